// The page of a captured graph: rows, lines between them, folding, search, and the selected node.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const count = data.number.length, ROW = 24, MARGIN = 12, SMALL = 60, FEW = 8, MAX_LINKS = 12, MAX_PRINTED = 4000;
const around = neighbours(count, data.edges);
const isCritical = new Uint8Array(count);
for (const node of data.critical) isCritical[node] = 1;
const text = (column, node) => (data[column][node] < 0 ? null : data.strings[data[column][node]]);
const placeOf = (node) => text("label", node) ?? text("module", node);
const chains = chainsOf(count, around, (node) => data.label[node] * data.strings.length + data.module[node]);
const open = new Set(count <= SMALL ? chains.keys() : []);
let rows = [], lines = [], rowOf = [], lanes = 1, gap = 14, selected = -1, onlyPath = false, matches = null, printing = false;

// ---- Layout
function arrange() {
  ({rows, row: rowOf, lines} = rowsOf(count, data.edges, chains, open, (node) => !onlyPath || isCritical[node]));
  lanes = lanesOf(rows, lines, (row) => isCritical[row.nodes[0]]);
  gap = lanes <= 12 ? 14 : Math.max(4, 168 / lanes);
  document.documentElement.style.setProperty("--gutter", Math.round(2 * MARGIN + (lanes - 1) * gap) + "px");
  $("space").style.height = rows.length * ROW + "px";
  $("rows").setAttribute("aria-rowcount", rows.length);
  $("fold").disabled = !open.size; $("unfold").disabled = open.size === chains.length;
  draw();
}
const x = (lane) => MARGIN + lane * gap, y = (row) => row * ROW + ROW / 2;
const began = (row) => Math.min(...row.nodes.map((node) => data.start[node]));
const took = (row) => row.nodes.reduce((sum, node) => sum + data.duration[node], 0);
const ended = (row) => Math.max(...row.nodes.map((node) => data.start[node] + data.duration[node]));

// ---- Drawing: only what is inside the window
function draw() {
  const view = $("view"), high = Math.ceil(view.clientHeight / ROW);
  const from = printing ? 0 : Math.max(0, Math.floor(view.scrollTop / ROW) - 8);
  const to = printing ? Math.min(rows.length, MAX_PRINTED) : Math.min(rows.length, from + high + 16);
  const list = [];
  for (let i = from; i < to; i++) list.push(rowElement(rows[i], i));
  $("rows").replaceChildren(...list);
  $("rows").setAttribute("aria-activedescendant", selected >= from && selected < to ? "row" + selected : "");
  drawLines(from, to);
}
function drawLines(from, to) {
  const svg = $("edges"), parts = [], chosen = selected < 0 ? -1 : selected;
  svg.style.top = from * ROW + "px";
  svg.setAttribute("width", 2 * MARGIN + (lanes - 1) * gap); svg.setAttribute("height", (to - from) * ROW);
  svg.setAttribute("viewBox", `0 ${from * ROW} ${2 * MARGIN + (lanes - 1) * gap} ${(to - from) * ROW}`);
  for (const line of lines) {
    if (line.to < from || line.from >= to) continue;
    const onPath = rows[line.from].lane === 0 && rows[line.to].lane === 0 && line.lane === 0;
    const near = line.from === chosen || line.to === chosen;
    parts.push([onPath + 2 * near, "path", {d: shape(line), class: near ? "chosen" : onPath ? "path" : ""}]);
  }
  parts.sort((a, b) => a[0] - b[0]);
  for (let i = from; i < to; i++) {
    const kind = (isCritical[rows[i].nodes[0]] ? "path " : "") + (rows[i].folded ? "fold" : "");
    parts.push([0, "circle", {cx: x(rows[i].lane), cy: y(i), r: rows[i].folded ? 5 : 4, class: kind}]);
  }
  svg.replaceChildren(...parts.map(([, tag, attributes]) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }));
}
function shape({from, to, lane}) {
  const a = x(rows[from].lane), b = x(rows[to].lane), l = x(lane), top = y(from), bottom = y(to);
  const bend = (x0, y0, x1, y1) => (x0 === x1 ? ` L${x1} ${y1}` : ` C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`);
  const low = Math.min(top + ROW, bottom), up = Math.max(bottom - ROW, top);
  if (a === l && b === l) return `M${a} ${top} L${b} ${bottom}`;
  if (a === l) return `M${a} ${top} L${a} ${up}` + bend(a, up, b, bottom);
  if (b === l) return `M${a} ${top}` + bend(a, top, b, low) + ` L${b} ${bottom}`;
  const middle = Math.max(top + ROW * 0.5, Math.min(low, bottom - ROW * 0.5));
  return `M${a} ${top}` + bend(a, top, l, middle) + ` L${l} ${Math.max(up, middle)}` + bend(l, Math.max(up, middle), b, bottom);
}
function rowElement(row, i) {
  const node = row.nodes[0], made = element("div", undefined, "row"), place = placeOf(node);
  made.id = "row" + i; made.setAttribute("role", "row"); made.setAttribute("aria-rowindex", i + 1);
  made.setAttribute("aria-selected", String(i === selected)); made.setAttribute("aria-level", row.chain >= 0 && !row.folded && chains[row.chain][0] !== node ? 2 : 1);
  made.style.top = i * ROW + "px";
  if (isCritical[node]) made.classList.add("path");
  if (matches) made.classList.add(row.nodes.some((n) => matches[n]) ? "hit" : "dim");
  const heads = row.chain >= 0 && chains[row.chain][0] === node;
  if (heads) made.setAttribute("aria-expanded", String(!row.folded));
  const what = element("span", undefined, "what"), figure = element("span", time(took(row)), "figure"), line = element("span", undefined, "line");
  what.append(element("span", heads ? (row.folded ? "▸" : "▾") : "", "more"));
  const phase = text("phase", node);
  if (place) what.append(element("b", clean(place)), phase && phase !== "forward" ? ` ${clean(phase)}  ` : "  ");
  what.append(element("span", row.folded ? counted(row.nodes.length, "node") + (place ? "" : ": " + clean(text("name", node)) + " ...") : clean(text("name", node)), "kernel"));
  what.title = clean((place ? place + "\n" : "") + text("name", node));
  const bar = element("i"), start = began(row);
  bar.style.left = 100 * start / data.replay + "%"; bar.style.width = 100 * (ended(row) - start) / data.replay + "%";
  line.append(bar);
  const gutter = element("span");
  for (const cell of [gutter, what, figure, line]) cell.setAttribute("role", "gridcell");
  made.append(gutter, what, figure, line);
  made.addEventListener("click", () => { select(i); if (heads) toggle(row); });
  return made;
}

// ---- The selected node
function select(i, scroll = false) {
  selected = Math.max(0, Math.min(i, rows.length - 1));
  const view = $("view");
  if (scroll) {
    if (y(selected) - ROW < view.scrollTop) view.scrollTop = y(selected) - ROW;
    if (y(selected) + ROW > view.scrollTop + view.clientHeight) view.scrollTop = y(selected) + ROW - view.clientHeight;
  }
  tell(); draw();
}
function tell() {
  const row = rows[selected], box = $("detail"), node = row.nodes[0], end = row.nodes.at(-1), list = element("dl");
  const facts = row.folded
    ? [["nodes", counted(row.nodes.length, "node") + ", one after the other"], ["sum of mean times", time(took(row))]]
    : [["node", String(data.number[node])], ["kind", text("kind", node)], ["mean time", time(took(row))]];
  facts.push(["of a replay", share(took(row), data.replay)], ["starts after", time(began(row))]);
  for (const what of ["label", "module", "phase"]) if (text(what, node)) facts.push([what, clean(text(what, node))]);
  facts.push(["critical path", isCritical[node] ? "yes" : "no"]);
  for (const [what, value] of facts) { const pair = element("div"); pair.append(element("dt", what), element("dd", value)); list.append(pair); }
  box.replaceChildren(element("h2", row.folded ? placeOf(node) ?? counted(row.nodes.length, "node") : clean(text("name", node))), list);
  if (!row.folded && text("full", node)) box.append(element("div", clean(text("full", node)), "full"));
  links(box, "waits for", around.before[node]); links(box, "before", around.after[end]);
}
function links(box, what, nodes) {
  const line = element("p", nodes.length ? what + " " : what + " no other node");
  for (const node of nodes.slice(0, MAX_LINKS)) {
    const button = element("button", clean((placeOf(node) ? placeOf(node) + " · " : "") + text("name", node)));
    button.type = "button"; button.addEventListener("click", () => reach(node));
    line.append(button);
  }
  if (nodes.length > MAX_LINKS) line.append(`and ${number(nodes.length - MAX_LINKS)} more`);
  box.append(line);
}
function reach(node) {
  if (rowOf[node] < 0) { onlyPath = false; $("only").setAttribute("aria-pressed", "false"); arrange(); }
  select(rowOf[node], true);
}
function toggle(row) {
  if (row.chain < 0) return;
  const node = chains[row.chain][0];
  if (open.has(row.chain)) open.delete(row.chain); else open.add(row.chain);
  arrange(); select(rowOf[node], true);
}

// ---- Search
function find() {
  const asks = $("search").value, test = asked(asks);
  matches = asks === "" || test === null ? null : new Uint8Array(count);
  $("matched").textContent = test === null ? "not a valid regular expression" : "";
  let found = 0, sum = 0;
  if (matches) {
    const hit = data.strings.map(test);
    for (let i = 0; i < count; i++) {
      matches[i] = ["name", "full", "label", "module"].some((column) => data[column][i] >= 0 && hit[data[column][i]]) ? 1 : 0;
      if (matches[i]) { found++; sum += data.duration[i]; }
    }
    $("matched").textContent = `${counted(found, "node")}, ${time(sum)}`;
  }
  $("next").disabled = !found;
  draw();
}
function nextMatch() {
  for (let k = 1; k <= rows.length; k++) {
    const i = (Math.max(selected, -1) + k) % rows.length;
    if (rows[i].nodes.some((node) => matches[node])) { select(i, true); return; }
  }
}

// ---- Keyboard and tools
$("rows").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const row = rows[selected], page = Math.max(1, Math.floor($("view").clientHeight / ROW) - 1);
  const moves = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length};
  if (event.key in moves) select(selected + moves[event.key], true);
  else if (row && (event.key === "ArrowRight" ? row.folded : event.key === "ArrowLeft" ? row.chain >= 0 && !row.folded : ["Enter", " "].includes(event.key))) toggle(row);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target === $("search");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { $("search").focus(); $("search").select(); event.preventDefault(); }
  if (event.key === "Escape" && typing) { $("search").value = ""; find(); }
  if (event.key === "Enter" && typing && !$("next").disabled) nextMatch();
});
$("search").addEventListener("input", find);
$("next").addEventListener("click", nextMatch);
function again() {
  const node = selected < 0 ? -1 : rows[selected].nodes[0];
  arrange();
  if (node >= 0 && rowOf[node] >= 0) select(rowOf[node], true);
  else { selected = -1; $("detail").replaceChildren(); draw(); }
}
$("only").addEventListener("click", () => { onlyPath = !onlyPath; $("only").setAttribute("aria-pressed", String(onlyPath)); again(); });
$("unfold").addEventListener("click", () => { chains.forEach((_, c) => open.add(c)); again(); });
$("fold").addEventListener("click", () => { open.clear(); again(); });
let waiting = false;
function refresh() { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }
$("view").addEventListener("scroll", refresh);
window.addEventListener("resize", refresh);
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}
const preference = matchMedia("(prefers-color-scheme: dark)");
preference.addEventListener("change", () => theme(preference.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
let before = "light";
window.addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; printing = true; theme("light"); draw(); });
window.addEventListener("afterprint", () => { printing = false; theme(before); draw(); });

// ---- Begin
$("title").textContent = data.title;
$("inputs").textContent = $("inputs").title = data.inputs;
for (const [what, value] of data.facts) { const item = element("span", what + " "); item.append(element("b", value)); $("facts").append(item); }
for (const note of data.notes) $("notes").append(element("li", note));
$("end").textContent = time(data.replay);
$("rows").setAttribute("aria-label", `${data.title}: ${counted(count, "node")}, critical path ${time(data.path)}`);
theme(preference.matches ? "dark" : "light");
arrange();
if (rows.length < FEW) { chains.forEach((_, c) => open.add(c)); arrange(); }   // a graph without places is one chain
