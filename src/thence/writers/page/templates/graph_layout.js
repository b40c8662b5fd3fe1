// The layout of a captured graph: one row for each node or folded chain, in an order in which each comes after those
// that it waits for, and lanes for the lines between them. The critical path is the first lane.

const MAX_LANES = 40;   // further lines share the last lane
const MIN_FOLDED = 3;   // nodes of a chain that becomes one row

// The nodes behind and before each node.
function neighbours(count, edges) {
  const after = Array.from({length: count}, () => []), before = Array.from({length: count}, () => []);
  for (let i = 0; i < edges.length; i += 2) { after[edges[i]].push(edges[i + 1]); before[edges[i + 1]].push(edges[i]); }
  return {after, before};
}

// Chains of nodes in the same place, each of which waits only for the one before: lists of nodes.
function chainsOf(count, {after, before}, place) {
  const chains = [], seen = new Uint8Array(count);
  for (let i = 0; i < count; i++) {
    if (seen[i]) continue;
    const chain = [i];
    for (let last = i; after[last].length === 1;) {
      const next = after[last][0];
      if (before[next].length !== 1 || place(next) !== place(i)) break;
      chain.push(next); seen[next] = 1; last = next;
    }
    if (chain.length >= MIN_FOLDED) chains.push(chain);
  }
  return chains;
}

// The rows that are shown, and the edges between them.
//   chains: as from chainsOf; open: the chains that are unfolded; shown: whether a node is shown.
function rowsOf(count, edges, chains, open, shown) {
  const row = new Int32Array(count).fill(-1), chainOf = new Int32Array(count).fill(-1), rows = [];
  chains.forEach((chain, c) => { for (const node of chain) chainOf[node] = c; });
  for (let i = 0; i < count; i++) {
    if (!shown(i)) continue;
    const c = chainOf[i], folded = c >= 0 && !open.has(c);
    if (!folded || chains[c][0] === i) rows.push({nodes: folded ? chains[c] : [i], chain: c, folded});
    row[i] = folded ? row[chains[c][0]] : rows.length - 1;
    if (folded && chains[c][0] === i) row[i] = rows.length - 1;
  }
  const lines = new Map();
  for (let i = 0; i < edges.length; i += 2) {
    const a = row[edges[i]], b = row[edges[i + 1]];
    if (a >= 0 && b >= 0 && a !== b) lines.set(a * rows.length + b, {from: a, to: b});
  }
  return {rows, row, lines: [...lines.values()]};
}

// Gives each row a lane, and each line the lane in which it runs down.
function lanesOf(rows, lines, critical) {
  const count = rows.length, after = Array.from({length: count}, () => []), before = Array.from({length: count}, () => []);
  for (const line of lines) { after[line.from].push(line); before[line.to].push(line); }
  const strand = new Int32Array(count).fill(-1), strands = [{rows: []}];
  for (let i = 0; i < count; i++) {   // rows that follow each other directly are a strand; the critical path is the first
    let found = critical(rows[i]) ? 0 : -1;
    for (const line of found < 0 ? before[i] : []) {
      const s = strand[line.from];
      if (s > 0 && strands[s].rows[strands[s].rows.length - 1] === line.from) { found = s; break; }
    }
    if (found < 0) { found = strands.length; strands.push({rows: []}); }
    strand[i] = found; strands[found].rows.push(i);
  }
  const spans = strands.map(({rows: own}) => ({top: own[0], bottom: own[own.length - 1]})), loose = [];
  const first = (i) => strands[strand[i]].rows[0] === i, last = (i) => strands[strand[i]].rows.at(-1) === i;
  const following = new Map();
  for (const {rows: own} of strands) own.forEach((i, k) => following.set(i, own[k + 1]));
  for (const line of lines) {
    const {from, to} = line;
    if (strand[from] === strand[to] && following.get(from) === to) line.of = strand[from];
    else if (first(to) && strand[to]) { line.of = strand[to]; spans[line.of].top = Math.min(spans[line.of].top, from); }
    else if (last(from) && strand[from]) { line.of = strand[from]; spans[line.of].bottom = Math.max(spans[line.of].bottom, to); }
    else { line.of = spans.length; spans.push({top: from, bottom: to}); loose.push(line); }
  }
  const ends = [Infinity], lane = new Int32Array(spans.length);   // until which row each lane is taken; lane 0 is the path's
  const order = spans.map((_, s) => s).slice(1).sort((a, b) => spans[a].top - spans[b].top || a - b);
  for (const s of order) {
    let free = ends.findIndex((end) => end <= spans[s].top);
    if (free < 0) free = ends.length < MAX_LANES ? ends.length : MAX_LANES - 1;
    ends[free] = Math.max(ends[free] ?? -1, spans[s].bottom); lane[s] = free;
  }
  rows.forEach((row, i) => { row.lane = lane[strand[i]]; });
  for (const line of lines) line.lane = lane[line.of];
  return ends.length;
}
