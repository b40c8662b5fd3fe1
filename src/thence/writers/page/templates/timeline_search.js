// Search on the timeline: by name, place, step, launch or cause of idle time.

function timelineSearch(data) {
  const {rows, gaps, parts} = data;

  // Prefix sums of the matches: the number of matching rows before each row, and at the end of all rows.
  function marks(count, test) {
    const before = new Uint32Array(count + 1);
    for (let i = 0; i < count; i++) before[i + 1] = before[i] + (test(i) ? 1 : 0);
    return before;
  }
  function search(text) {
    const test = text === "" ? null : asked(text);
    if (!test) return text === "" ? null : undefined;
    const names = data.names.map(([short, full]) => test(short) || (full !== null && test(full)));
    const texts = data.texts.map(test), places = data.places.map((place) => place.some((number) => number >= 0 && texts[number]));
    const steps = [false, ...data.steps.map(test)], calls = [false, ...data.calls.map(test)];
    const causes = [false, ...data.causes.map(([cause, , name]) => test(cause) || (name !== null && test(name)))];
    const ofRow = marks(rows.start.length, (i) => names[rows.name[i]] || places[rows.place[i]] || steps[rows.step[i]] || steps[rows.iteration[i]] || calls[rows.call[i]]);
    const ofGap = marks(gaps.start.length, (i) => {
      for (let part = gaps.first[i]; part < gaps.first[i] + gaps.parts[i]; part++) if (causes[parts.cause[part]]) return true;
      return false;
    });
    return {
      rows: ofRow[rows.start.length],
      gaps: ofGap[gaps.start.length],
      ns: rows.duration.reduce((sum, duration, i) => sum + (ofRow[i + 1] > ofRow[i] ? duration : 0), 0),
      of: (track) => {
        if (track.use) return {any: () => false};
        const before = track.idle ? ofGap : ofRow;
        return {any: (from, to) => before[to] > before[from]};
      },
    };
  }
  // The next match after the selection, ordered by time, then by track; `by` is 1 forwards, -1 backwards. Null if
  // there is none.
  function next(hits, selected, by) {
    const own = selected ? data.tracks.indexOf(selected.track) : -1;
    const begin = selected ? selected.track.table.start[selected.row] : -by * Infinity;
    let best = null;
    data.tracks.forEach((track, number) => {
      const {start} = track.table, here = hits.of(track);
      let row = number === own ? selected.row + by : firstFrom(track, begin, by, (number - own) * by > 0);
      while (row >= track.from && row < track.to && !here.any(row, row + 1)) row += by;
      if (row < track.from || row >= track.to) return;
      if (!best || by * start[row] < by * best.track.table.start[best.row] || (by < 0 && start[row] === best.track.table.start[best.row])) best = {track, row};
    });
    return best;
  }
  // The first row of a track after a time (backwards: before it). With `sameTime`, a row at the same time counts too.
  function firstFrom(track, begin, by, sameTime) {
    const {start} = track.table, found = lastBefore(track, begin);
    let row = found < 0 ? track.from - 1 : found;
    if (by > 0 === sameTime) while (row >= track.from && start[row] === begin) row--;
    return by > 0 ? row + 1 : row;
  }
  return {search, next};
}
