// Formats numbers and names, and makes elements that show them. Names come from traces: they are always set as text,
// never as HTML.

function scaled(value, steps, smallest) {
  for (const [size, unit] of steps) {
    if (Math.abs(value) < size) continue;
    const shown = value / size, digits = Math.abs(shown);
    return shown.toFixed(digits < 10 ? 3 : digits < 100 ? 2 : digits < 1000 ? 1 : 0) + " " + unit;
  }
  return value.toFixed(0) + " " + smallest;
}
const time = (ns) => scaled(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "us"]], "ns");
const size = (bytes) => scaled(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]], "B");
const number = (n) => n.toLocaleString("en-US");
const counted = (n, what) => number(n) + " " + (n === 1 ? what : what.replace(/y$/, "ie") + "s");
function share(part, whole) {
  if (!whole) return "-";
  const percent = 100 * part / whole;
  if (percent > 0 && percent < 0.05) return "<0.1 %";
  if (percent >= 99.95 && percent < 100 - 1e-9) return ">99.9 %";
  return percent.toFixed(1) + " %";
}

const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const clean = (text) => text.slice(0, 400).replace(CONTROLS, "\ufffd");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// The test of a search: whether a name contains a text, or matches /a regular expression/; null if that is invalid.
function asked(text) {
  const regex = /^\/(.+)\/$/.exec(text), part = text.toLowerCase();
  if (!regex) return (name) => name.toLowerCase().includes(part);
  try {
    const pattern = new RegExp(regex[1], "i");
    return (name) => pattern.test(name);
  } catch (error) {
    return null;
  }
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";
const FONT = '12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';

// Measures texts for a canvas, and shortens them to a given width.
function textFitter(pen) {
  const widths = new Map();
  function widthOf(text) {
    let width = widths.get(text);
    if (width === undefined) {
      width = pen.measureText(text).width;
      if (widths.size < 50000) widths.set(text, width);
    }
    return width;
  }
  function fitted(text, room, fromFile = false) {
    text = clean(text);
    if (widthOf(text) <= room) return text;
    const cut = fromFile ? text.search(/[^/]*$/) : 0;   // of a long path, keep the file name
    if (cut > 0) {
      text = text.slice(cut);
      if (widthOf(text) <= room) return text;
    }
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(text.slice(0, middle) + "…").width <= room) low = middle; else high = middle - 1;
    }
    return low > 1 ? text.slice(0, low) + "…" : "";
  }
  return {widthOf, fitted};
}

// The fill pattern of idle time on the timeline and in flame graphs.
function idlePattern(pen) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = css("idle");
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = isDark() ? "rgba(255,255,255,.07)" : "rgba(60,70,80,.12)";
  brush.lineWidth = 1.5;
  brush.beginPath();
  for (const x of [-8, 0, 8]) { brush.moveTo(x - 1, 9); brush.lineTo(x + 9, -1); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

// Shows a tooltip next to the pointer: a name, the full name, and facts.
function showTip(box, event, name, full, facts) {
  box.replaceChildren(element("div", name.slice(0, 1000), "name"));
  if (full) box.append(element("div", full, "full"));
  const table = element("table");
  for (const [what, text] of facts) table.insertRow().append(element("th", what), element("td", text));
  box.append(table);
  box.hidden = false;
  const room = box.getBoundingClientRect(), x = event.clientX + 14, y = event.clientY + 16;
  box.style.left = Math.max(4, x + room.width > innerWidth - 6 ? event.clientX - room.width - 10 : x) + "px";
  box.style.top = Math.max(4, y + room.height > innerHeight - 6 ? event.clientY - room.height - 10 : y) + "px";
}

// Sets the size of a canvas in CSS pixels, scales it to the device's pixels, and clears it.
function fitCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  pen.textBaseline = "middle";
}
