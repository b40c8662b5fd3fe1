// Next to the timeline: the facts about the selected activity, and the view's content as a table.

function timelinePanel(data, facts, view) {
  const panel = element("div", undefined, "details"), table = element("details", undefined, "as-text");
  panel.id = "timeline-details";
  panel.hidden = true;

  // ---- The selected activity or gap
  function show(selected) {
    panel.replaceChildren();
    panel.hidden = selected === null;
    if (selected === null) return;
    const {track, row} = selected, full = facts.fullOf(track, row);
    panel.append(element("h3", clean(facts.titleOf(track, row))));
    if (full) panel.append(element("div", full, "full"));
    const list = element("dl");
    const say = (what, text, className) => list.append(element("dt", what), element("dd", text, className));
    for (const [what, text] of facts.facts(track, row)) say(what, text);
    if (track.idle) for (const each of facts.causesOf(row)) say(each.cause, causeText(each));
    else if (!track.use) {
      for (const [kind, place, why] of facts.placesOf(row)) if (place !== null || why) say(kind, place === null ? `none: ${why}` : place, place === null ? "none" : "");
      const launch = facts.launchOf(row), before = facts.idleBefore(track, row);
      if (launch) say("launch", launch);
      const gap = element("dd", before.text);
      for (const each of before.causes) gap.append(element("div", `${each.cause} ${causeText(each)}`));
      list.append(element("dt", "idle before"), gap);
    }
    panel.append(list);
  }
  function causeText(each) {
    const where = each.name ? `, ${each.by === "reason" ? "" : each.by + " "}${clean(each.name)}` : "";
    return time(each.ns) + where + (each.meaning && each.cause !== "unknown" ? ` (${each.meaning})` : "");
  }

  // ---- The view's content as a table, for assistive technology
  const head = ["track", "in view", "time", "of the view", "takes most of it"];
  function lines() {
    const {from, to} = view.state, span = to - from;
    return data.tracks.map((track) => {
      const own = track.table, sums = new Map();
      const add = (name, ns) => sums.set(name, (sums.get(name) || 0) + ns);
      let count = 0, busy = 0, sampled = 0;
      visit(track, from, to, 0, (row) => {
        const length = own.end[row] - own.start[row], inside = Math.min(own.end[row], to) - Math.max(own.start[row], from);
        const part = length ? inside / length : 0;   // fraction inside the view
        count += track.idle || track.use ? 1 : own.more[row] + 1;
        busy += part * own.busy[row];
        sampled += inside;
        if (track.idle) for (const each of facts.causesOf(row)) add(each.cause, part * each.ns);
        else if (!track.use) add(facts.nameOf(track, row), part * own.busy[row]);
      }, () => {});
      const [name, ns] = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a), ["-", 0]);
      return [track.name, counted(count, track.use ? "sample" : track.idle ? "gap" : "activity"), track.use ? "-" : time(busy), share(busy, track.use ? sampled : span), ns ? `${clean(name)} (${time(ns)})` : "-"];
    });
  }
  function fill() {
    const made = element("table"), header = element("thead"), body = element("tbody"), top = element("tr");
    made.append(element("caption", `From ${time(view.state.from)} to ${time(view.state.to)}`));
    for (const title of head) { const cell = element("th", title, title === head[0] || title === head[4] ? "text" : ""); cell.scope = "col"; top.append(cell); }
    for (const line of lines()) {
      const row = element("tr");
      line.forEach((text, i) => {
        const cell = element(i ? "td" : "th", text, i === 0 || i === 4 ? "text" : "");
        if (!i) cell.scope = "row";
        row.append(cell);
      });
      body.append(row);
    }
    header.append(top);
    made.append(header, body);
    const scroll = element("div", undefined, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "What is in view");
    scroll.append(made);
    table.replaceChildren(element("summary", "What is in view, as a table"), scroll);
  }
  table.append(element("summary", "What is in view, as a table"));
  table.addEventListener("toggle", () => { if (table.open) fill(); });
  let later = 0;
  view.onView(() => {
    if (!table.open) return;
    clearTimeout(later);
    later = setTimeout(fill, 200);
  });
  return {panel, table, show};
}
