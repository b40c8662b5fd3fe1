// Tables: search, sorting by a click on a heading, 25 rows at a time.

const SHOW = {
  text: String,
  number: String,
  count: number,
  ns: time,
  bytes: size,
  gbps: (x) => x.toFixed(x < 10 ? 3 : x < 100 ? 2 : 1),
  share: (x) => share(x, 1),
};
const AT_ONCE = 25, SEARCHED = 8, WORD = 26;

function table(place, content, title) {
  const {columns, rows} = content, order = rows.map((_, i) => i);
  let wanted = order, shown = AT_ONCE, sorted = -1, direction = -1;
  const largest = columns.map((column, c) => (column.bar ? Math.max(1e-12, ...rows.map((row) => row[c] || 0)) : 0));
  // Columns of short words are only as wide as needed, which leaves room for columns of names.
  const classes = columns.map((column, c) => {
    if (column.kind !== "text") return column.bar ? "bar" : "";
    return rows.every((row) => (row[c] || "").length <= WORD) && c + 1 < columns.length ? "word" : "text";
  });
  const found = element("output"), input = element("input"), body = element("tbody"), head = element("tr"), more = element("button", "", "more");
  input.type = "search";
  input.placeholder = "Search, or /regex/";
  input.setAttribute("aria-label", `Search rows: ${title}`);
  more.type = "button";

  columns.forEach((column, c) => {
    const th = element("th", undefined, classes[c] === "bar" ? "" : classes[c]), button = element("button", column.title, "sort");
    th.scope = "col";
    button.type = "button";
    if (column.meaning) button.title = column.meaning;
    button.addEventListener("click", () => sortBy(c, th));
    th.append(button);
    head.append(th);
  });
  function sortBy(c, th) {
    direction = sorted === c ? -direction : columns[c].kind === "text" ? 1 : -1;
    sorted = c;
    for (const other of head.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", direction < 0 ? "descending" : "ascending");
    order.sort((a, b) => {
      const x = rows[a][c], y = rows[b][c];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return direction * (x < y ? -1 : x > y ? 1 : 0) || a - b;
    });
    search();
  }
  const textOf = (i) => rows[i].filter((_, c) => columns[c].kind === "text").join(" ") + " " + (content.full ? content.full[i] : "");
  function search() {
    const test = asked(input.value) || (() => false);
    wanted = input.value ? order.filter((i) => test(textOf(i))) : order;
    shown = AT_ONCE;
    fill();
  }
  function fill() {
    body.replaceChildren(...wanted.slice(0, shown).map(row));
    found.textContent = wanted.length === order.length ? `${number(order.length)} rows` : `${number(wanted.length)} of ${number(order.length)} rows`;
    more.hidden = wanted.length <= shown;
    more.textContent = `Show ${number(Math.min(wanted.length - shown, 10 * AT_ONCE))} more`;
  }
  function row(i) {
    const tr = element("tr", undefined, content.muted && content.muted[i] ? "muted" : "");
    columns.forEach((column, c) => {
      const value = rows[i][c], text = value === null ? "-" : SHOW[column.kind](value);
      const td = element("td", text, classes[c]);
      if (column.bar && value > 0) {
        const bar = element("i");
        bar.style.width = `calc(${(100 * value / largest[c]).toFixed(1)}% * .45)`;
        td.append(bar);
      }
      if (c === 0 && content.full) td.title = content.full[i];
      tr.append(td);
    });
    return tr;
  }
  input.addEventListener("input", search);
  more.addEventListener("click", () => { shown += 10 * AT_ONCE; fill(); });

  const above = element("div", undefined, "bar-above"), scroll = element("div", undefined, "scroll");
  const texts = classes.includes("text"), whole = element("table", undefined, texts ? "" : "narrow"), header = element("thead");
  above.append(input, found);
  if (order.length > SEARCHED) place.append(above);
  scroll.tabIndex = 0;   // focusable, so that the keyboard can scroll wide tables
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", `Table: ${title}`);
  header.append(head);
  whole.append(header, body);
  scroll.append(whole);
  place.append(scroll, more);
  if (content.note) place.append(element("p", content.note, "notes"));
  fill();
}

// Tabs of a list: the arrow keys select the next tab.
function tabs(list) {
  const buttons = [...list.children], panelOf = (button) => document.getElementById(button.getAttribute("aria-controls"));
  function choose(chosen, focus) {
    for (const button of buttons) {
      button.setAttribute("aria-selected", String(button === chosen));
      button.tabIndex = button === chosen ? 0 : -1;
      panelOf(button).hidden = button !== chosen;
    }
    if (focus) chosen.focus();
  }
  list.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], at = buttons.indexOf(document.activeElement);
    if (!by || at < 0) return;
    choose(buttons[(at + by + buttons.length) % buttons.length], true);
    event.preventDefault();
  });
  for (const button of buttons) button.addEventListener("click", () => choose(button, false));
  if (buttons.length) choose(buttons[0], false);
}
