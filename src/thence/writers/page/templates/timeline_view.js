// Draws the timeline's current time window: single activities where they are wide enough, and otherwise one column per
// pixel from the summaries of the pyramid.

const FAINTEST = 0.45, ROW_HEIGHT = 24, AXIS = 22, WIDEST_GUTTER = 230, NARROW = 700, CAPTION = 15, LABELLED = 26, THIN = 4;

function timelineView(data, facts, place) {
  const canvas = element("canvas"), space = element("div", undefined, "space"), scroller = element("div", undefined, "view");
  const pen = canvas.getContext("2d"), {widthOf, fitted} = textFitter(pen);
  scroller.append(space, canvas);
  place.append(scroller);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  const all = {from: 0, to: Math.max(data.span, 1)};
  const state = {from: 0, to: all.to, selected: null, hovered: null, band: null, hits: null, printing: false};
  let colours = {};

  function recolour() {
    colours = {ink: css("ink"), soft: css("soft"), line: css("line"), accent: css("accent"), mark: css("mark"), paper: css("paper")};
    colours.classes = [css("compute"), css("communication"), css("copy")];
    colours.far = [css("compute-far"), css("communication-far"), css("copy-far")];   // stronger colours for thin shapes
    colours.idle = idlePattern(pen);
    colours.use = css("soft");
  }

  // ---- Geometry
  const narrow = () => scroller.clientWidth < NARROW;
  pen.font = FONT;
  const gutter = Math.min(WIDEST_GUTTER, 16 + Math.max(...data.tracks.map((track) => widthOf(track.name))));
  const left = () => (narrow() ? 0 : gutter);
  const rowHeight = () => ROW_HEIGHT + (narrow() ? CAPTION : 0);
  const width = () => Math.max(scroller.clientWidth - left() - 1, 20);
  const wholeHeight = () => AXIS + data.tracks.length * rowHeight() + 2;
  const nsPerPixel = () => (state.to - state.from) / width();
  const xOf = (ns) => left() + (ns - state.from) / nsPerPixel();
  const nsAt = (x) => state.from + (x - left()) * nsPerPixel();
  const yOf = (number) => AXIS + number * rowHeight() + (narrow() ? CAPTION : 0) - (state.printing ? 0 : scroller.scrollTop);

  function draw() {
    const height = state.printing ? Math.min(wholeHeight(), 8000) : scroller.clientHeight;
    space.style.height = wholeHeight() + "px";
    fitCanvas(canvas, scroller.clientWidth, height);
    const ticks = ticksOfView();
    pen.fillStyle = colours.line;
    for (const [x] of ticks) pen.fillRect(x, 0, 1, height);
    data.tracks.forEach((track, number) => {
      const y = yOf(number);
      if (y + ROW_HEIGHT < 0 || y > height) return;
      caption(track, y);
      pen.save();
      pen.beginPath();
      pen.rect(left(), y, width(), ROW_HEIGHT);
      pen.clip();
      drawTrack(track, y + 1, ROW_HEIGHT - 3);
      pen.restore();
    });
    drawMarker();
    drawAxis(ticks);
    if (state.band) {
      const [from, to] = state.band;
      pen.fillStyle = colours.accent;
      pen.globalAlpha = 0.16;
      pen.fillRect(Math.min(from, to), AXIS, Math.abs(to - from), height);
      pen.globalAlpha = 1;
    }
  }
  function caption(track, y) {
    pen.fillStyle = colours.soft;
    if (narrow()) pen.fillText(fitted(track.name, width()), 2, y - CAPTION / 2 + 1);
    else {
      const text = fitted(track.name, gutter - 12);
      pen.fillText(text, gutter - 8 - widthOf(text), y + ROW_HEIGHT / 2);
    }
    pen.fillStyle = colours.line;
    pen.fillRect(left(), y + ROW_HEIGHT - 1, width(), 1);
  }

  // ---- One track
  function drawTrack(track, y, height) {
    const pixel = nsPerPixel(), columns = Math.ceil(width()), busy = new Float64Array(columns * CLASSES), found = new Uint8Array(columns), held = new Float64Array(columns);
    const {table} = track, hits = state.hits && state.hits.of(track), wide = [];
    const columnOf = (ns) => Math.min(columns - 1, Math.max(0, Math.floor((ns - state.from) / pixel)));
    visit(track, state.from, state.to, pixel, (row) => {
      if (table.end[row] - table.start[row] >= pixel) { wide.push(row); return; }
      const column = columnOf((table.start[row] + table.end[row]) / 2);
      busy[column * CLASSES + table.class[row]] += table.busy[row];
      held[column] += table.end[row] - table.start[row];
      if (hits && hits.any(row, row + 1)) found[column] = 1;
    }, (level, entry, first, last) => {
      const column = columnOf((level.start[entry] + level.end[entry]) / 2);
      for (let c = 0; c < CLASSES; c++) busy[column * CLASSES + c] += level.busy[entry * CLASSES + c];
      held[column] += level.end[entry] - level.start[entry];
      if (hits && hits.any(first, last)) found[column] = 1;
    });
    for (let column = 0; column < columns; column++) drawColumn(track, column, busy, found, y, height, track.use ? held[column] : pixel);
    let reached = -Infinity;
    for (const row of wide) {
      drawOne(track, row, y, height, table.start[row] < reached, hits && hits.any(row, row + 1));
      reached = Math.max(reached, table.end[row]);
    }
  }
  function drawColumn(track, column, busy, found, y, height, whole) {
    let most = 0, sum = 0;
    for (let c = 0; c < CLASSES; c++) {
      const ns = busy[column * CLASSES + c];
      sum += ns;
      if (ns > busy[column * CLASSES + most]) most = c;
    }
    if (sum === 0) return;
    const dimmed = state.hits && !found[column] ? 0.3 : 1, faintest = track.idle ? 0.2 : FAINTEST;
    const part = Math.min(1, sum / whole), tall = track.use ? part * height : height;
    pen.globalAlpha = track.use ? 1 : dimmed * (faintest + (1 - faintest) * part);
    pen.fillStyle = found[column] ? colours.mark : track.use ? colours.use : track.idle ? colours.idle : colours.far[most];
    pen.fillRect(left() + column, y + height - tall, 1, tall);
    pen.globalAlpha = 1;
  }
  // Draws one activity. If it begins while an earlier activity of its stream runs, it is drawn on the lower half.
  function drawOne(track, row, y, height, overlaps, hit) {
    const {table} = track, from = Math.max(xOf(table.start[row]), left() - 4), to = Math.min(xOf(table.end[row]), left() + width() + 4);
    const part = track.use ? Math.min(1, table.busy[row] / (table.end[row] - table.start[row])) : overlaps ? 0.5 : 1;
    const tall = part * height, top = y + height - tall, wide = to - from, gap = wide > 3 && !track.use ? 1 : 0;
    pen.globalAlpha = state.hits && !hit && !track.use ? 0.3 : 1;
    pen.fillStyle = hit ? colours.mark : track.use ? colours.use : track.idle ? colours.idle : (wide < THIN ? colours.far : colours.classes)[table.class[row]];
    pen.fillRect(from, top, wide - gap, tall);
    const chosen = isAt(state.selected, track, row);
    if (chosen || isAt(state.hovered, track, row)) {
      pen.strokeStyle = chosen ? colours.accent : colours.ink;
      pen.lineWidth = chosen ? 2 : 1;
      pen.strokeRect(from + 1, top + 1, Math.max(wide - gap - 2, 1), tall - 2);
    }
    if (wide > LABELLED && !overlaps && !track.use) {
      pen.fillStyle = hit && isDark() ? "#14171b" : track.idle ? colours.soft : colours.ink;
      pen.fillText(fitted(facts.nameOf(track, row), Math.min(wide, left() + width() - from) - 10), Math.max(from, left()) + 5, top + tall / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }
  // A frame around the selected activity, so that it is visible even if it is narrower than a pixel.
  function drawMarker() {
    if (!state.selected) return;
    const {track, row} = state.selected, from = xOf(track.table.start[row]), to = xOf(track.table.end[row]);
    if (to - from >= 4 || to < left() || from > left() + width()) return;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 2;
    pen.strokeRect(from - 2, yOf(data.tracks.indexOf(track)), Math.max(to - from, 1) + 4, ROW_HEIGHT - 1);
  }
  const isAt = (at, track, row) => at !== null && at.track === track && at.row === row;

  // ---- The axis: its lines are drawn behind the tracks, its labels above them
  function ticksOfView() {
    const span = state.to - state.from, rough = span / Math.max(2, width() / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const [unit, ns] = [["s", 1e9], ["ms", 1e6], ["us", 1e3]].find(([, ns]) => state.to >= ns && step >= ns / 1000) || ["ns", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / ns) - 1e-9)), ticks = [];
    for (let tick = Math.ceil(state.from / step) * step; tick <= state.to; tick += step) ticks.push([xOf(tick), (tick / ns).toFixed(digits) + " " + unit]);
    return ticks;
  }
  function drawAxis(ticks) {
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, scroller.clientWidth, AXIS);
    for (const [x, text] of ticks) {
      pen.fillStyle = colours.line;
      pen.fillRect(x, 0, 1, AXIS);
      pen.fillStyle = colours.soft;
      if (x + 4 + widthOf(text) < left() + width()) pen.fillText(text, x + 4, AXIS / 2);
    }
  }

  // ---- Window
  function show(from, to) {
    const shortest = 20, span = Math.min(Math.max(to - from, shortest), all.to), middle = (from + to) / 2;
    state.from = Math.min(Math.max(middle - span / 2, 0), all.to - span);
    state.to = state.from + span;
    refresh();
  }
  function zoom(factor, at = (state.from + state.to) / 2) {
    const part = (at - state.from) / (state.to - state.from), span = Math.min((state.to - state.from) * factor, all.to);
    show(at - part * span, at + (1 - part) * span);
  }
  const pan = (part) => show(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));

  // The activity or gap at a point of the canvas. Of several, the longest on the upper half of a track, and the last
  // to start on the lower half, where overlapping activities are drawn. If there is none, the longest nearby.
  function at(x, y) {
    const below = y - AXIS + scroller.scrollTop, number = Math.floor(below / rowHeight()), track = data.tracks[number];
    if (y < AXIS || !track || x < left()) return null;
    const lower = below - number * rowHeight() > rowHeight() - ROW_HEIGHT / 2, reach = 2 * nsPerPixel(), ns = nsAt(x);
    const {start, end} = track.table, here = [], nearby = [];
    visit(track, ns - reach, ns + reach, 0, (row) => (start[row] <= ns && ns < end[row] ? here : nearby).push(row), () => {});
    const longest = (rows) => rows.reduce((a, b) => (end[b] - start[b] > end[a] - start[a] ? b : a));
    if (here.length) return {track, row: lower ? here[here.length - 1] : longest(here)};
    return nearby.length ? {track, row: longest(nearby)} : null;
  }
  // The point on the canvas of a time on a track.
  const placeOf = (ns, number) => [xOf(ns), yOf(number) + ROW_HEIGHT / 2];
  function scrollTo(track) {
    const y = data.tracks.indexOf(track) * rowHeight();
    if (y < scroller.scrollTop) scroller.scrollTop = y;
    const bottom = y + rowHeight() + AXIS + 4;
    if (bottom > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = bottom - scroller.clientHeight;
  }

  let waiting = false, listeners = [];
  function refresh() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); listeners.forEach((listener) => listener()); });
  }
  recolour();
  scroller.style.height = Math.min(wholeHeight() + 2, 560) + "px";
  scroller.addEventListener("scroll", refresh);
  new ResizeObserver(() => { scroller.style.height = state.printing ? "auto" : Math.min(wholeHeight() + 2, 560) + "px"; refresh(); }).observe(place);
  return {canvas, scroller, state, all, draw, refresh, recolour, show, zoom, pan, at, nsAt, placeOf, scrollTo, onView: (listener) => listeners.push(listener)};
}
