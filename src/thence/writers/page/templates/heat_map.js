// The heat map of a job: a row for each rank, a column for each step. The canvas has a pixel for each cell and is
// stretched over its place; steps that do not count are grey; the arrow keys and the pointer select a cell, whose figures the status line has.

function heatMap(place, data) {
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const maps = data.maps.map((map) => ({title: map.title, values: floats(map.values)}));
  const ranks = data.names.length, steps = data.steps.length;
  const counts = data.counted.some(Boolean) ? data.counted : data.counted.map(() => true);
  const caused = data.names.map((_, i) => i), spent = (ns) => (Number.isNaN(ns) ? "-" : time(ns));
  let shown = maps[0], order = data.by_rank, at = null;

  const tools = element("div", undefined, "tools"), scale = element("output"), status = element("p", undefined, "status");
  const map = element("div", undefined, "heat"), names = element("div", undefined, "names"), columns = element("div", undefined, "columns");
  const canvas = element("canvas"), context = canvas.getContext("2d"), ring = element("div", undefined, "ring");
  const choices = (label, options, chosen) => {
    const outer = element("label", label + " "), select = element("select");
    options.forEach((text, i) => { const option = element("option", text); option.value = i; select.append(option); });
    select.addEventListener("change", () => { chosen(Number(select.value)); draw(); });
    outer.append(select);
    return outer;
  };
  tools.append(
    choices("colour:", maps.map((each) => each.title), (i) => { shown = maps[i]; }),
    choices("order:", ["by rank", "most waited for first"], (i) => { order = i ? caused : data.by_rank; }), scale);
  canvas.width = steps; canvas.height = ranks; canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Heat map: a row for each rank, a column for each step. Arrow keys select a cell; the table below has every rank.");
  status.setAttribute("role", "status");
  const grey = counts.every(Boolean) ? "" : "; grey: steps that are left out of the figures";
  status.textContent = `a row is a rank, a column a step${grey}: point at a cell, or use the arrow keys`;
  const field = element("div", undefined, "field");
  field.append(canvas, ring);
  map.append(element("div"), columns, names, field);
  const scroll = element("div", undefined, "view");
  scroll.append(map);
  place.append(tools, scroll, status);

  const height = () => Math.max(1, Math.min(16, Math.floor(480 / ranks)));
  function range() {
    const sorted = Float32Array.from(shown.values.filter((value, i) => counts[i % steps] && !Number.isNaN(value))).sort();
    if (!sorted.length) return [0, 1];
    const waits = shown === maps[0] || shown === maps[3];
    const low = waits ? 0 : sorted[Math.floor(0.02 * sorted.length)];
    return [low, Math.max(sorted[Math.min(sorted.length - 1, Math.floor(0.998 * sorted.length))], low + 1)];
  }
  function draw() {
    const [low, high] = range(), image = context.createImageData(steps, ranks);
    for (let row = 0; row < ranks; row++) for (let step = 0; step < steps; step++) {
      const value = shown.values[order[row] * steps + step];
      if (Number.isNaN(value)) continue;
      const part = Math.max(0, Math.min(1, (value - low) / (high - low)));
      image.data.set([...(counts[step] ? [200, 70, 30] : [125, 125, 125]), Math.round(255 * (0.05 + 0.95 * part))], 4 * (row * steps + step));
    }
    context.putImageData(image, 0, 0);
    canvas.style.height = `${height() * ranks}px`;
    scale.textContent = `from ${time(low)} (pale) to ${time(high)} (strong)`;
    name();
    select(null);
  }
  function name() {
    const every = Math.max(1, Math.ceil(14 / height()));
    names.replaceChildren();
    let free = 0;
    order.forEach((rank, row) => {
      if (row < free || (row % every && !data.late[rank])) return;
      const label = element("span", data.names[rank], data.late[rank] ? "late" : "");
      label.style.top = `${(row + 0.5) * height()}px`;
      names.append(label);
      free = row + every;
    });
    columns.replaceChildren(...(steps > 1 ? [0, steps - 1] : [0]).map((step) => element("span", data.steps[step] + (counts[step] ? "" : " (left out)"))));
  }
  function select(cell) {
    at = cell;
    ring.hidden = !cell;
    if (!cell) return;
    const [row, step] = cell, rank = order[row];
    ring.style.cssText = `left: ${100 * step / steps}%; width: ${100 / steps}%; top: ${row * height()}px; height: ${height()}px`;
    const figures = maps.map((each) => `${each.title} ${spent(each.values[rank * steps + step])}`).join(", ");
    status.textContent = `${data.names[rank]}${data.late[rank] ? " (late)" : ""}, ${data.steps[step]}: ${figures}${counts[step] ? "" : "; this step is left out of the figures"}`;
  }
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height * ranks), step = Math.floor((event.clientX - box.left) / box.width * steps);
    if (row >= 0 && row < ranks && step >= 0 && step < steps) select([row, step]);
  });
  canvas.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!by) return;
    const [row, step] = at || [0, -by[1]];
    select([Math.max(0, Math.min(ranks - 1, row + by[0])), Math.max(0, Math.min(steps - 1, step + by[1]))]);
    event.preventDefault();
  });
  draw();
}
