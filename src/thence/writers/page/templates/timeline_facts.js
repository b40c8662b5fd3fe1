// Facts about one activity or one gap, for the tooltip, the panel and the status line.

function timelineFacts(data) {
  const {rows, gaps, parts} = data;
  const gapTracks = new Map(data.tracks.filter((track) => track.idle).map((track) => [track.key, track]));

  const nameOf = (track, i) => (track.use ? share(track.table.busy[i], track.table.end[i] - track.table.start[i]) : track.idle ? causeOf(gaps.first[i])[0] : data.names[rows.name[i]][0]);
  const fullOf = (track, i) => (track.idle || track.use ? null : data.names[rows.name[i]][1]);
  const causeOf = (part) => {
    const number = parts.cause[part];
    return number ? data.causes[number - 1] : ["several smaller causes", null, null];
  };
  const titleOf = (track, i) => {
    if (track.use) return `${track.name}: ${nameOf(track, i)}`;
    if (track.idle) return "Idle: " + nameOf(track, i);
    return rows.more[i] ? `${number(rows.more[i] + 1)} activities, the longest ${nameOf(track, i)}` : nameOf(track, i);
  };

  // The place of each kind: [kind, place or null, reason why there is none].
  function placesOf(i) {
    const place = data.places[rows.place[i]];
    return data.kinds.map((kind, k) => [kind, place[k] < 0 ? null : data.texts[place[k]], place[k] < 0 ? data.texts[-1 - place[k]] : null]);
  }
  function launchOf(i) {
    if (rows.more[i]) return null;
    if (!rows.call[i]) return "The trace holds no launch of it.";
    const lead = rows.lead[i], call = data.calls[rows.call[i] - 1];
    const when = lead >= 0 ? `${time(lead)} before it started` : `${time(-lead)} after it started: the clocks of host and device disagree`;
    return `${call}; the call began ${when} and took ${time(rows.took[i])}.`;
  }
  // The gap of the whole device that ended when the activity started; -1 if there is none.
  function gapBefore(track, i) {
    const found = gapTracks.get(track.key), start = rows.start[i];
    if (!found) return -1;
    const gap = lastBefore(found, start);
    if (gap < 0) return -1;
    if (gaps.end[gap] === start) return gap;
    return gap > found.from && gaps.end[gap - 1] === start ? gap - 1 : -1;
  }
  function causesOf(gap) {
    const list = [];
    for (let part = gaps.first[gap]; part < gaps.first[gap] + gaps.parts[gap]; part++) {
      const [cause, by, name] = causeOf(part);
      list.push({cause, by, name, ns: parts.ns[part], meaning: data.meanings[cause] || ""});
    }
    return list;
  }
  function idleBefore(track, i) {
    const gap = gapBefore(track, i);
    if (gap >= 0) return {gap, text: `The GPU was idle for ${time(gaps.end[gap] - gaps.start[gap])} before it:`, causes: causesOf(gap)};
    if (i === track.from && rows.start[i] === 0) return {gap, text: "The trace begins with it.", causes: []};
    return {gap, text: "None: the GPU was busy until it started.", causes: []};
  }
  function facts(track, i) {
    const {table} = track;
    if (track.use) return [["counted in", time(table.end[i] - table.start[i])], ["start", time(table.start[i])]];
    const list = [["duration", time(table.end[i] - table.start[i])], ["start", time(table.start[i])], ["on", track.name]];
    if (table.end[i] - table.start[i] > table.busy[i]) list.splice(1, 0, [track.idle ? "idle of it" : "busy, not counting overlap", time(table.busy[i])]);
    if (track.idle) return list;
    if (rows.step[i]) list.push(["step", data.steps[rows.step[i] - 1]]);
    if (rows.iteration[i]) list.push(["iteration", data.steps[rows.iteration[i] - 1]]);
    return list;
  }
  // A few facts for the tooltip, the most important first.
  function brief(track, i) {
    const list = facts(track, i).slice(0, 3);
    if (track.use) return list;
    if (track.idle) return list.concat(causesOf(i).map((each) => [each.cause, time(each.ns) + (each.name ? ", " + clean(each.name) : "")]));
    for (const [kind, place] of placesOf(i)) if (place !== null && list.length < 7) list.push([kind, clean(place)]);
    const gap = gapBefore(track, i);
    if (gap >= 0) list.push(["idle before", `${time(gaps.end[gap] - gaps.start[gap])}, ${causeOf(gaps.first[gap])[0]}`]);
    return list;
  }
  function sentence(track, i) {
    return clean(titleOf(track, i)) + "  ·  " + brief(track, i).map(([what, text]) => `${what} ${text}`).join("  ·  ");
  }
  return {nameOf, fullOf, titleOf, placesOf, launchOf, idleBefore, causesOf, facts, brief, sentence};
}
