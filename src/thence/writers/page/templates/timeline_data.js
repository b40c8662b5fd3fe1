// Decodes the timeline in the page: activities, gaps and samples of counters as columns, and a pyramid for each track.
// thence/writers/page/timeline_data.py describes the format.

async function decodedTimeline(base64) {
  const text = atob(base64), deflated = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) deflated[i] = text.charCodeAt(i);
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const end = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, end)));
  let at = end;
  const tables = {};
  for (const [table, name, count, planes] of data.columns) {
    const values = new Float64Array(count);
    for (let plane = 0, weight = 1; plane < planes; plane++, weight *= 256)
      for (let i = 0; i < count; i++) values[i] += weight * bytes[at++];
    (tables[table] = tables[table] || {})[name] = values;
  }
  return {...data, ...tables, tracks: tracksOf(data, tables)};
}

// ---- Computed columns: start, end and busy time of every activity; in gaps, `busy` is the idle time, and in samples of
// counters the share of the limit that was used, times the duration.

const unfolded = (n) => (n % 2 ? -(n + 1) / 2 : n / 2);
function summed(differences) {
  const result = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < result.length; i++) result[i] = sum += unfolded(differences[i]);
  return result;
}
function completeRows(rows) {
  rows.start = summed(rows.start);
  rows.end = rows.start.map((start, i) => start + rows.duration[i]);
  rows.busy = rows.duration.map((duration, i) => duration - rows.covered[i]);
  rows.lead = rows.lead.map(unfolded);
}
function completeGaps(gaps, parts) {
  const count = gaps.start.length, between = gaps.busy;
  gaps.start = summed(gaps.start);
  gaps.first = new Float64Array(count);   // index of the gap's first row in `parts`
  gaps.busy = new Float64Array(count);
  gaps.end = new Float64Array(count);
  gaps.class = new Float64Array(count);
  let part = 0;
  for (let i = 0; i < count; i++) {
    gaps.first[i] = part;
    for (const end = part + gaps.parts[i]; part < end; part++) gaps.busy[i] += parts.ns[part];
    gaps.end[i] = gaps.start[i] + gaps.busy[i] + between[i];
  }
}

function completeUse(use) {
  use.start = summed(use.start);
  use.end = use.start.map((start, i) => start + use.duration[i]);
  use.class = new Float64Array(use.start.length);
}

// Tracks in the order in which they are shown: for each device the causes of its idle time, its streams, its counters.
function tracksOf(data, {rows, gaps, parts, use}) {
  completeRows(rows);
  completeGaps(gaps, parts);
  completeUse(use);
  const several = new Set(data.lanes.map((lane) => lane.rank + " " + lane.device)).size > 1, tracks = [];
  let row = 0, gap = 0;
  const gapsOf = new Map();
  for (const device of data.devices) {
    gapsOf.set(device.rank + " " + device.device, [gap, gap + device.gaps]);
    gap += device.gaps;
  }
  for (const lane of data.lanes) {
    const key = lane.rank + " " + lane.device, before = several ? `rank ${lane.rank} GPU ${lane.device}: ` : "";
    const last = tracks[tracks.length - 1], own = gapsOf.get(key);
    if (own && (!last || last.key !== key)) {
      tracks.push(track(key, before + "why idle", "idle", gaps, own[0], own[1]));
    }
    tracks.push(track(key, before + lane.name, "stream", rows, row, row + lane.rows));
    row += lane.rows;
  }
  let sample = 0;
  for (const counter of data.counters) {
    const key = counter.rank + " " + counter.device, before = several ? `rank ${counter.rank} GPU ${counter.device}: ` : "";
    const after = tracks.findLastIndex((each) => each.key === key) + 1;
    if (after) tracks.splice(after, 0, track(key, before + counter.counter, "use", use, sample, sample + counter.rows));
    sample += counter.rows;
  }
  return tracks;
}
function track(key, name, kind, table, from, to) {
  return {key, name, idle: kind === "idle", use: kind === "use", table, from, to, levels: pyramid(table, from, to)};
}

// ---- The pyramid: an entry summarizes `FAN` entries of the level below; in the lowest level, `FAN` rows.

const FAN = 8, CLASSES = 3;
function pyramid(table, from, to) {
  const levels = [];
  let below = {start: table.start.subarray(from, to), end: table.end.subarray(from, to)};
  let busyOf = (i, c) => (table.class[from + i] === c ? table.busy[from + i] : 0);
  while (below.start.length > 1) {
    const count = Math.ceil(below.start.length / FAN);
    const level = {start: new Float64Array(count), end: new Float64Array(count), busy: new Float64Array(count * CLASSES)};
    for (let g = 0; g < count; g++) {
      const first = g * FAN, last = Math.min(first + FAN, below.start.length);
      level.start[g] = below.start[first];
      for (let i = first; i < last; i++) {
        if (below.end[i] > level.end[g]) level.end[g] = below.end[i];
        for (let c = 0; c < CLASSES; c++) level.busy[g * CLASSES + c] += busyOf(i, c);
      }
    }
    levels.push(level);
    below = level;
    busyOf = (i, c) => level.busy[i * CLASSES + c];
  }
  return levels;
}

// Visits the content of a track in a time window: calls `many(level, entry, first, last)` for entries of the pyramid
// that are shorter than `least`, with the range of rows that they summarize, and `one(row)` for other rows.
function visit(track, from, to, least, one, many) {
  const {table, levels} = track;
  function descend(depth, i) {
    if (depth < 0) {
      const row = track.from + i;
      if (table.start[row] < to && table.end[row] > from) one(row);
      return;
    }
    const level = levels[depth];
    if (level.start[i] >= to || level.end[i] <= from) return;
    const width = FAN ** (depth + 1), first = track.from + i * width;
    if (level.end[i] - level.start[i] < least) many(level, i, first, Math.min(first + width, track.to));
    else {
      const below = depth ? levels[depth - 1].start.length : track.to - track.from;
      for (let child = i * FAN; child < Math.min((i + 1) * FAN, below); child++) descend(depth - 1, child);
    }
  }
  if (track.to > track.from) descend(levels.length - 1, 0);
}

// The last row of a track that starts at or before a time; -1 if there is none.
function lastBefore(track, at) {
  let low = track.from, high = track.to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.table.start[middle] <= at) low = middle + 1; else high = middle;
  }
  return low > track.from ? low - 1 : -1;
}
