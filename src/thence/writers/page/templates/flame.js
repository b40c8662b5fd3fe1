// A flame graph: its tree, drawing, zoom, search and filters.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const count = data.parent.length;
const OF_BYTES = data.unit === "bytes", amount = OF_BYTES ? size : time, AMOUNT = OF_BYTES ? "bytes" : "time";
const GAP = 1, SMALLEST = 0.5, LABELLED = 24, PAD = 5, OUTER = 16, INNER = 112;
let ROW = 21;
const KINDS = ["compute", "communication", "copy", "idle", "smaller"];
const UNKNOWN = "unknown", KNOWN = Object.keys(data.phases), PHASES = [...KNOWN, UNKNOWN];
const WORDS = {unknown: "phase unknown", smaller: "merged"};
const phaseTime = (what, i) =>
  what === UNKNOWN ? KNOWN.reduce((left, phase) => left - data.phases[phase][i], data.total[i]) : data.phases[what][i];
const nameOf = (i) => data.strings[data.name[i]];
const kindOf = (i) => data.kinds[data.kind[i]];

// ---- The tree: children by decreasing time, idle last. The index of a parent is less than those of its children.
const children = Array.from({length: count}, () => []);
for (let i = 1; i < count; i++) children[data.parent[i]].push(i);
const isIdle = (i) => (kindOf(i) === "idle" ? 1 : 0);
for (const list of children) list.sort((a, b) => isIdle(a) - isIdle(b) || data.total[b] - data.total[a] || a - b);

const on = {};
for (const what of [...KINDS, ...PHASES]) on[what] = true;
const value = new Float64Array(count);   // ns of each frame under the current filters
let matches = new Uint8Array(count), under = new Uint8Array(count), searching = false, onlyMatches = false;
let zoom = 0, selected = 0, hovered = -1, rows = [];

function partOf(leaf) {
  const kind = kindOf(leaf);
  if (kind === "idle") return on.idle ? data.total[leaf] : 0;
  if (kind in on && !on[kind]) return 0;
  return PHASES.reduce((sum, what) => sum + (on[what] ? phaseTime(what, leaf) : 0), 0);
}
function weigh() {
  value.fill(0);
  for (let i = count - 1; i >= 0; i--) {
    if (!children[i].length && !(searching && onlyMatches && !under[i])) value[i] = partOf(i);
    if (i) value[data.parent[i]] += value[i];
  }
}

// ---- Colours
const hashes = data.strings.map((text) => {
  let h = 2166136261;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
  return (h ^ (h >>> 15)) >>> 0;
});
let colours = {}, hatch = null;
function mix() {
  colours = {paper: css("paper"), ink: css("ink"), soft: css("soft"), accent: css("accent"), mark: css("mark")};
  for (const kind of [...KINDS, "unattributed"]) colours[kind] = css(kind);
  hatch = idlePattern($("graph").getContext("2d"));
}
function fill(i) {
  const kind = kindOf(i), h = hashes[data.name[i]];
  if (kind === "idle") return hatch;
  if (kind === "smaller" || kind === "unattributed") return colours[kind];
  if ($("colour").value === "name" && kind !== "root") {
    return `hsl(${(h % 15) * 24}, ${isDark() ? 22 : 38}%, ${(isDark() ? 34 : 78) + (h >> 8) % 6}%)`;
  }
  if (kind === "frame" || kind === "root") {
    return isDark() ? `hsl(${32 + h % 14}, 11%, ${26 + (h >> 8) % 6}%)` : `hsl(${34 + h % 12}, 34%, ${86 + (h >> 8) % 6}%)`;
  }
  return colours[kind];
}

// ---- Drawing: only frames that are wider than half a pixel and inside the window
const canvas = $("graph"), pen = canvas.getContext("2d"), view = $("view"), {widthOf, fitted} = textFitter(pen);
function pathTo(i) { const path = []; for (; i >= 0; i = i ? data.parent[i] : -1) path.push(i); return path.reverse(); }
function depthBelow(i) {
  let deepest = 0;
  const stack = [[i, 0]];
  while (stack.length) { const [j, d] = stack.pop(); if (d > deepest) deepest = d; for (const c of children[j]) if (value[c] > 0) stack.push([c, d + 1]); }
  return deepest;
}
let above = [], height = 0;
function arrange() {
  above = pathTo(zoom).slice(0, -1);
  height = (above.length + depthBelow(zoom) + 1) * ROW;
  $("space").style.height = height + "px";
  $("empty").hidden = value[0] > 0;
}
let printing = false;
function draw() {
  const width = view.clientWidth, shown = printing ? Math.min(height, 8000) : view.clientHeight;
  fitCanvas(canvas, width, shown);
  rows = [];
  const top = printing ? 0 : view.scrollTop;
  above.forEach((i, row) => box(i, 0, width, row, top, shown, true));
  const stack = value[zoom] > 0 ? [[zoom, 0, width, above.length]] : [];
  while (stack.length) {
    const [i, x, w, row] = stack.pop();
    box(i, x, w, row, top, shown, false);
    if ((row + 1) * ROW - top > shown) continue;
    let at = x, left = 0;
    for (const child of children[i]) {
      const wide = w * value[child] / value[i];
      if (wide >= SMALLEST) stack.push([child, at, wide, row + 1]); else left += wide;
      at += wide;
    }
    if (left >= SMALLEST && children[i].length) dust(at - left, left, row + 1, top);
  }
}
function dust(x, w, row, top) {   // a thin bar in place of frames that are too narrow to draw
  pen.fillStyle = colours.smaller;
  pen.fillRect(x, row * ROW - top, w, 3);
}
function box(i, x, w, row, top, shown, outer) {
  const y = row * ROW - top;
  if (y + ROW < 0 || y > shown) return;
  (rows[row] = rows[row] || []).push([x, x + w, i]);
  const found = searching && matches[i], gap = w > 3 ? GAP : w > 1.5 ? 0.5 : 0;
  pen.globalAlpha = outer ? 0.55 : searching && !found && !under[i] ? 0.38 : 1;
  pen.fillStyle = found ? colours.mark : fill(i);
  pen.fillRect(x, y, w - gap, ROW - GAP);
  if (i === selected && document.activeElement === canvas || i === hovered) {
    pen.strokeStyle = i === hovered ? colours.ink : colours.accent; pen.lineWidth = i === hovered ? 1 : 2;
    pen.strokeRect(x + 1, y + 1, Math.max(w - gap - 2, 0.5), ROW - GAP - 2);
  }
  if (w > LABELLED) {
    const room = w - 2 * PAD - gap, text = fitted(nameOf(i), room, data.files);
    pen.fillStyle = found && isDark() ? "#14171b" : kindOf(i) === "idle" ? colours.soft : colours.ink;
    pen.fillText(text, x + PAD, y + ROW / 2);
    const figure = amount(value[i]) + "  " + share(value[i], value[0]), size = widthOf(figure);
    if (room - widthOf(text) > size + 18) {
      pen.globalAlpha *= 0.68;
      pen.fillText(figure, x + w - gap - PAD - size, y + ROW / 2);
    }
  }
  pen.globalAlpha = 1;
}
let waiting = false;
function refresh() { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }

// ---- The frame under the pointer
function frameAt(event) {
  const at = canvas.getBoundingClientRect(), x = event.clientX - at.left;
  const row = rows[Math.floor((event.clientY - at.top + view.scrollTop) / ROW)] || [];
  const found = row.find(([from, to]) => x >= from && x < to);
  return found ? found[2] : -1;
}
function facts(i) {
  const parent = i ? data.parent[i] : -1, shown = value[i], list = [[AMOUNT, amount(shown)], ["of all shown", share(shown, value[0])]];
  if (zoom && pathTo(i).includes(zoom)) list.push(["of the view", share(shown, value[zoom])]);
  if (parent >= 0) list.push(["of the frame around it", share(shown, value[parent])]);
  const n = data.count[i];
  list.push([kindOf(i) === "idle" ? "gaps" : "activities", number(n)]);
  if (n && i) list.push(["mean", amount(data.total[i] / n)]);
  for (const what of KNOWN) if (data.phases[what][i]) list.push([what, amount(data.phases[what][i])]);
  if (Math.abs(shown - data.total[i]) > 0.5) list.push([AMOUNT + " without filters", amount(data.total[i])]);
  return list;
}
const tip = (i, event) => showTip($("tip"), event, nameOf(i), data.full[i] >= 0 ? data.strings[data.full[i]] : null, facts(i));
function tell(i) { $("status").textContent = i < 0 ? "" : clean(nameOf(i)) + "  ·  " + facts(i).map(([what, text]) => `${what} ${text}`).join("  ·  "); }

// ---- Zoom
function zoomTo(i) {
  zoom = selected = i;
  view.scrollTop = 0;
  crumbs(); arrange(); draw(); tell(i);
}
function crumbs() {
  const bar = $("crumbs");
  bar.replaceChildren();
  const path = pathTo(zoom), hidden = path.length > OUTER + INNER ? path.length - OUTER - INNER : 0;
  path.forEach((i, depth) => {
    if (hidden && depth >= OUTER && depth < OUTER + hidden) {   // thousands of buttons would hide the graph
      if (depth === OUTER) bar.append(element("span", "›"), element("span", `… ${number(hidden)} frames …`));
      return;
    }
    if (depth) bar.append(element("span", "›"));
    const button = element("button", clean(nameOf(i)));
    button.type = "button"; button.title = clean(nameOf(i));
    if (i === zoom) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => zoomTo(i));
    bar.append(button);
  });
}

// ---- Search
function find() {
  const text = $("search").value, test = asked(text);
  searching = text !== "" && test !== null;
  matches.fill(0); under.fill(0);
  if (test === null) $("matched").textContent = "not a valid regular expression";
  if (searching) {
    const hit = data.strings.map(test);
    for (let i = 0; i < count; i++) {
      matches[i] = hit[data.name[i]] || (data.full[i] >= 0 && hit[data.full[i]]) ? 1 : 0;
      under[i] = matches[i] || (i && under[data.parent[i]]) ? 1 : 0;
    }
  }
  $("only").disabled = !searching;
  weigh();
  if (searching) {
    // The time of a matching frame includes the matching frames inside it.
    let total = 0, frames = 0, whole = 0;
    for (let i = 0; i < count; i++) { frames += matches[i]; if (matches[i] && !(i && under[data.parent[i]])) total += value[i]; if (!children[i].length) whole += partOf(i); }
    $("matched").textContent = `${number(frames)} frame${frames === 1 ? "" : "s"}, ${amount(total)}, ${share(total, whole)}`;
  } else if (text === "") $("matched").textContent = "";
  while (zoom && !(value[zoom] > 0)) zoom = selected = data.parent[zoom];   // the frame is hidden by the filters
  while (selected && !(value[selected] > 0)) selected = data.parent[selected];
  crumbs(); arrange(); draw(); tell(selected);
}

// ---- Filters
function chips() {
  const bar = $("chips"), sums = {};
  for (let i = 0; i < count; i++) {
    if (children[i].length) continue;
    const kind = kindOf(i);
    sums[kind] = (sums[kind] || 0) + data.total[i];
    if (kind === "idle") continue;
    for (const what of PHASES) sums[what] = (sums[what] || 0) + phaseTime(what, i);
  }
  const groups = [KINDS, KNOWN.some((what) => what !== "other") ? PHASES : []];
  for (const group of groups) for (const what of group) {
    if (!sums[what]) continue;
    const first = group === PHASES && !bar.querySelector(".apart");
    const chip = element("button", undefined, first ? "chip apart" : "chip");
    chip.type = "button"; chip.id = "chip-" + what; chip.setAttribute("aria-pressed", "true");
    chip.title = "Click to hide or show it; Shift-click to show only it";
    if (group === KINDS) { const dot = element("i"); dot.style.background = `var(--${what})`; chip.append(dot); }
    chip.append(element("b", WORDS[what] || what), element("span", amount(sums[what])));
    chip.querySelector("b").style.fontWeight = "500";
    chip.addEventListener("click", (event) => {
      const others = group.filter((other) => other !== what && sums[other]);
      if (event.shiftKey) { const alone = on[what] && others.every((other) => !on[other]); for (const other of others) on[other] = alone; on[what] = true; }
      else on[what] = !on[what];
      press(); find();
    });
    bar.append(chip);
  }
}
function press() { for (const chip of $("chips").children) chip.setAttribute("aria-pressed", String(on[chip.id.slice(5)])); }

// ---- Keyboard
function step(by) {
  const around = selected ? children[data.parent[selected]].filter((i) => value[i] > 0) : [0];
  return around[Math.min(Math.max(around.indexOf(selected) + by, 0), around.length - 1)];
}
function move(key) {
  if (key === "ArrowDown") { const below = children[selected].filter((i) => value[i] > 0); if (below.length) selected = below[0]; }
  if (key === "ArrowUp" && selected) selected = data.parent[selected];
  if (key === "ArrowLeft") selected = step(-1);
  if (key === "ArrowRight") selected = step(1);
  if (key === "Home") selected = 0;
  if (!pathTo(selected).includes(zoom)) { zoom = selected; crumbs(); arrange(); }
  const y = (pathTo(selected).length - 1) * ROW;
  if (y < view.scrollTop) view.scrollTop = y;
  if (y + ROW > view.scrollTop + view.clientHeight) view.scrollTop = y + ROW - view.clientHeight;
  tell(selected); draw();
}
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(Arrow|Home)/.test(event.key)) move(event.key);
  else if (event.key === "Enter" || event.key === " ") zoomTo(selected);
  else return;
  $("tip").hidden = true;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target === $("search");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { $("search").focus(); $("search").select(); event.preventDefault(); }
  if (event.key === "Escape") {
    if (typing && $("search").value) { $("search").value = ""; find(); }
    else if (zoom) zoomTo(data.parent[zoom]);
  }
  if (event.key === "Enter" && typing) canvas.focus();
});

// ---- Pointer
canvas.addEventListener("mousemove", (event) => {
  const i = frameAt(event);
  if (i !== hovered) { hovered = i; refresh(); if (i >= 0) tell(i); }
  if (i >= 0) tip(i, event); else $("tip").hidden = true;
});
canvas.addEventListener("mouseleave", () => { hovered = -1; $("tip").hidden = true; tell(selected); refresh(); });
canvas.addEventListener("click", (event) => { const i = frameAt(event); if (i >= 0) { $("tip").hidden = true; zoomTo(i); } });
canvas.addEventListener("focus", refresh);
canvas.addEventListener("blur", refresh);
view.addEventListener("scroll", refresh);
new ResizeObserver(refresh).observe(view);

// ---- Tools
$("search").addEventListener("input", find);
$("only").addEventListener("click", () => { onlyMatches = !onlyMatches; $("only").setAttribute("aria-pressed", String(onlyMatches)); find(); });
$("colour").addEventListener("change", draw);
$("reset").addEventListener("click", () => {
  for (const what of Object.keys(on)) on[what] = true;
  onlyMatches = false; $("only").setAttribute("aria-pressed", "false"); $("search").value = "";
  press(); zoom = selected = 0; crumbs(); find(); tell(0);
});
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  mix(); draw();
}
const preference = matchMedia("(prefers-color-scheme: dark)");
preference.addEventListener("change", () => theme(preference.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
let before = "light";
window.addEventListener("beforeprint", () => { before = isDark() ? "dark" : "light"; printing = true; theme("light"); });
window.addEventListener("afterprint", () => { printing = false; theme(before); });

// ---- Begin
$("title").textContent = data.title;
$("inputs").textContent = $("inputs").title = data.inputs;
for (const [what, text] of data.facts) { const item = element("span", what + " "); item.append(element("b", text)); $("facts").append(item); }
for (const note of data.notes) $("notes").append(element("li", note));
canvas.setAttribute("aria-label", data.title + ": " + number(count) + " frames, " + amount(data.total[0]));
chips();
// If the GPU was mostly idle, its work would be too narrow to see: leave idle time out at first, and say so.
let idle = 0;
for (let i = 1; i < count; i++) if (isIdle(i) && data.parent[i] === 0) idle += data.total[i];
if (idle > data.total[0] / 2 && idle < data.total[0]) {
  on.idle = false; press();
  $("notes").append(element("li", `The GPU was idle for ${share(idle, data.total[0])} of the time. Idle time is hidden at first: click "idle" to show it.`, "strong"));
}
weigh(); crumbs(); tell(0);
if ((depthBelow(0) + 1) * 26 < view.clientHeight) ROW = 26;   // taller rows if there is room
arrange();
theme(preference.matches ? "dark" : "light");
