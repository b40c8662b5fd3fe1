// The timeline: connects buttons, search, pointer and keyboard to its view, its panel and its status line.

const KEYS_HELP = "Arrow keys go to the previous and next activity, and to other tracks. Enter zooms to it, Escape goes back, "
  + "plus and minus zoom, Shift with an arrow key moves the view, 0 shows all, N and P go to the next and previous match.";

async function timeline(place, base64) {
  const data = await decodedTimeline(base64), facts = timelineFacts(data), finder = timelineSearch(data);
  const tools = element("div", undefined, "tools"), status = element("p", "", "status"), help = element("p", KEYS_HELP, "notes"), tip = document.getElementById("tip");
  help.id = "timeline-keys";
  status.id = "timeline-status";
  status.setAttribute("role", "status");
  place.append(tools);
  const view = timelineView(data, facts, place), {canvas, state} = view, panel = timelinePanel(data, facts, view);
  canvas.id = "timeline-canvas";
  canvas.setAttribute("aria-label", `Timeline of ${counted(data.tracks.length, "track")} and ${time(data.span)}`);
  canvas.setAttribute("aria-describedby", help.id);
  place.append(status, panel.panel, panel.table, help);
  const history = [];   // the views before each zoom

  // ---- Actions
  function select(chosen, follow = true) {
    state.selected = chosen;
    panel.show(chosen);
    status.textContent = chosen ? facts.sentence(chosen.track, chosen.row) : "";
    if (chosen && follow) {
      const {start, end} = chosen.track.table, from = start[chosen.row], to = end[chosen.row], span = state.to - state.from;
      if (from < state.from || to > state.to) view.show((from + to - span) / 2, (from + to + span) / 2);
      view.scrollTo(chosen.track);
    }
    view.refresh();
  }
  function zoomTo(from, to) {
    history.push([state.from, state.to]);
    view.show(from, to);
  }
  function zoomAround(from, to) {
    const room = 0.6 * (to - from);
    zoomTo(from - room, to + room);
  }
  function zoomToSelected() {
    if (!state.selected) return;
    const {track, row} = state.selected;
    zoomAround(track.table.start[row], track.table.end[row]);
  }
  function back() {
    if (history.length) view.show(...history.pop());
    else view.show(0, view.all.to);
  }
  function showAll() { history.length = 0; view.show(0, view.all.to); }
  function step(by) {
    if (!state.selected) return first();
    const {track, row} = state.selected, to = row + by;
    if (to >= track.from && to < track.to) select({track, row: to});
  }
  function first() {
    const track = data.tracks.find((each) => !each.idle && !each.use && each.to > each.from);
    if (track) select({track, row: Math.max(lastBefore(track, state.from), track.from)});
  }
  function otherTrack(by) {
    if (!state.selected) return first();
    const {track, row} = state.selected, begin = track.table.start[row];
    for (let number = data.tracks.indexOf(track) + by; data.tracks[number]; number += by) {
      const other = data.tracks[number];
      if (other.to > other.from) return select({track: other, row: Math.max(lastBefore(other, begin), other.from)});
    }
  }
  function edge(last) {
    const track = state.selected ? state.selected.track : data.tracks[0];
    if (track && track.to > track.from) select({track, row: last ? track.to - 1 : track.from});
  }

  // ---- Tools
  const input = element("input"), matched = element("output", "");
  function button(text, label, action) {
    const made = element("button", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.title = label;
    made.addEventListener("click", action);
    tools.append(made);
    return made;
  }
  input.type = "search";
  input.id = "timeline-search";
  input.placeholder = "Search activities, or /regex/";
  input.setAttribute("aria-label", "Search activities and gaps on the timeline");
  matched.setAttribute("for", input.id);
  tools.append(input);
  const previous = button("‹ Match", "Previous match", () => goToMatch(-1)), following = button("Match ›", "Next match", () => goToMatch(1));
  tools.append(matched, element("span", undefined, "gap"));
  button("−", "Zoom out", () => view.zoom(2));
  button("+", "Zoom in", () => view.zoom(0.5));
  button("◀", "Earlier", () => view.pan(-0.25));
  button("▶", "Later", () => view.pan(0.25));
  button("Back", "Back to the view before the last zoom", back);
  button("All", "Show all of the time", showAll);
  tools.append(legend());
  function legend() {
    const made = element("div", undefined, "legend");
    const colours = ["compute", "communication", "copy"];
    const entries = data.classes.map((name, i) => [name, `var(--${colours[i]})`]);
    for (const [name, colour] of [...entries, ["idle", "var(--idle)"]]) {
      const entry = element("span", name), patch = element("i");
      patch.style.background = colour;
      entry.prepend(patch);
      made.append(entry);
    }
    return made;
  }
  function find() {
    const found = finder.search(input.value);
    state.hits = found || null;
    previous.disabled = following.disabled = !found || !(found.rows + found.gaps);
    if (found) matched.textContent = `${counted(found.rows, "activity")}, ${time(found.ns)}` + (found.gaps ? `; ${counted(found.gaps, "gap")}` : "");
    else matched.textContent = found === undefined ? "not a valid regular expression" : "";
    view.refresh();
  }
  function goToMatch(by) {
    const found = state.hits && finder.next(state.hits, state.selected, by);
    if (found) select(found);
  }
  input.addEventListener("input", find);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { goToMatch(event.shiftKey ? -1 : 1); event.preventDefault(); }
    if (event.key === "Escape" && input.value) { input.value = ""; find(); }
  });
  find();

  // ---- Keyboard
  const keys = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => otherTrack(-1), ArrowDown: () => otherTrack(1),
    Home: () => edge(false), End: () => edge(true), Enter: zoomToSelected, " ": zoomToSelected, Escape: back,
    "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: showAll,
    n: () => goToMatch(1), p: () => goToMatch(-1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && /^Arrow(Left|Right)$/.test(event.key)) view.pan(event.key === "ArrowLeft" ? -0.25 : 0.25);
    else if (keys[event.key]) keys[event.key]();
    else return;
    tip.hidden = true;
    event.preventDefault();
  });
  canvas.addEventListener("focus", view.refresh);
  canvas.addEventListener("blur", view.refresh);

  // ---- Pointer: a click selects, a drag zooms to what it covers, with Shift or a finger it moves the view
  let drag = null;
  const same = (a, b) => a === b || (a !== null && b !== null && a.track === b.track && a.row === b.row);
  const pointOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [x] = pointOf(event);
    drag = {x, last: x, moves: event.shiftKey || event.pointerType === "touch", far: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = pointOf(event);
    if (drag) {
      drag.far = drag.far || Math.abs(x - drag.x) > 4;
      if (drag.far && drag.moves) { const by = view.nsAt(drag.last) - view.nsAt(x); view.show(state.from + by, state.to + by); }
      else if (drag.far) { state.band = [drag.x, x]; view.refresh(); }
      drag.last = x;
      return;
    }
    const found = view.at(x, y);
    if (!same(found, state.hovered)) view.refresh();
    state.hovered = found;
    if (found) showTip(tip, event, facts.titleOf(found.track, found.row), null, facts.brief(found.track, found.row));
    else tip.hidden = true;
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [x, y] = pointOf(event), {far, moves} = drag;
    if (far && !moves) zoomTo(...[view.nsAt(drag.x), view.nsAt(x)].sort((a, b) => a - b));
    else if (!far) select(view.at(x, y), false);
    drag = state.band = null;
    view.refresh();
  });
  canvas.addEventListener("pointercancel", () => { drag = state.band = null; view.refresh(); });
  canvas.addEventListener("pointerleave", () => { state.hovered = null; tip.hidden = true; view.refresh(); });
  canvas.addEventListener("dblclick", zoomToSelected);
  canvas.addEventListener("wheel", (event) => {
    const [x] = pointOf(event);
    if (event.ctrlKey || event.metaKey) view.zoom(1.0015 ** event.deltaY, view.nsAt(x));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan(event.deltaX / 1000);
    else return;
    event.preventDefault();
  }, {passive: false});

  function printing(on) {
    state.printing = on;
    view.scroller.style.height = on ? "auto" : "";
    view.draw();
  }
  view.draw();
  return {data, view, select, zoomTo: zoomAround, recolour: () => { view.recolour(); view.draw(); }, printing};
}
