"use strict";
{
  const TOKENS = 32, CELL = 12, LEFT = 8, TOP = 24; // pixels
  // The windows of 05, 05d, 05r and 06, in tokens; q and k: the places of a query and a key.
  const NEAR = [
    (q, k, window) => q - k < window,
    (q, k, window, tile) => (Math.floor(q / tile) - Math.floor(k / tile)) * tile < window,
    (q, k, window) => q - k <= window,
    (q, k, window) => q - k <= window];

  // Whether a query sees a key: earlier or itself, near, and no document starts between them.
  const sees = (mode, starts, window, tile, q, k) =>
    q >= k && NEAR[mode](q, k, window, tile) && !starts.some((start) => k < start && start <= q);

  // {pairs: by query, the keys that it sees; tiles: by tile of queries and keys, its seen pairs}.
  function mask(mode, starts, window, tile, tokens = TOKENS) {
    const pairs = [], tiles = Array.from({length: tokens / tile}, () => Array(tokens / tile).fill(0));
    for (let q = 0; q < tokens; q++) {
      pairs.push([]);
      for (let k = 0; k <= q; k++) {
        if (!sees(mode, starts, window, tile, q, k)) continue;
        pairs[q].push(k);
        tiles[Math.floor(q / tile)][Math.floor(k / tile)]++;
      }
    }
    return {pairs, tiles};
  }
  function draw(all, {mode, window, power, second, third}, own) {
    const tile = 2 ** power, size = tile * CELL, count = TOKENS / tile, end = TOKENS * CELL;
    second = Math.min(second, third - 1); // the documents keep their order
    all("[name=second]")[0].value = second;
    const starts = [0, second, third];
    const {pairs, tiles} = mask(+mode, starts, window, tile);
    const listed = +mode < 3, paths = ["", ""], numbers = [0, 0]; // partly and fully visible tiles
    if (listed) tiles.forEach((row, q) => row.forEach((seen, k) => {
      if (!seen) return;
      const full = +(seen === tile * tile);
      paths[full] += `M${LEFT + k * size} ${TOP + q * size}h${size}v${size}h-${size}z`;
      numbers[full]++;
    }));
    [window, tile, second, third].forEach((value, i) => { all(".value")[i].textContent = value; });
    const set = (name, d) => all(`.${name}`)[0].setAttribute("d", d);
    set("partial", paths[0]);
    set("full", paths[1]);
    set("grid", Array.from({length: count + 1}, (_, i) =>
      `M${LEFT} ${TOP + i * size}h${end}M${LEFT + i * size} ${TOP}v${end}`).join(""));
    set("pairs", pairs.map((keys, q) => keys.length
      ? `M${LEFT + keys[0] * CELL + 4} ${TOP + q * CELL + 6}h${keys.length * CELL}` : "").join(""));
    set("one", starts.slice(1).map((start) =>
      `M${LEFT} ${TOP + start * CELL}h${end}M${LEFT + start * CELL} ${TOP}v${end}`).join(""));
    const seen = pairs.reduce((sum, keys) => sum + keys.length, 0);
    const some = numbers[0] + numbers[1], computed = some * tile * tile;
    const [tests, what] = +mode ? [count * count, "tiles"] : [TOKENS * TOKENS, "tokens"];
    all(".says")[0].textContent = `${own[+mode]}: ${seen} pairs are seen. ` + (listed
      ? `${some} of ${count * count} tiles are computed, ${numbers[1]} of them without applying the rule; `
        + `${Math.round(100 - 100 * seen / computed)}% of their pairs are not seen. Finding the tiles takes ${tests.toLocaleString("en")} tests, one for each pair of ${what}.`
      : `The script lists no tiles: the kernel gets the starts of the documents and chooses its own.`);
  }
  if (typeof module === "object") module.exports = {mask};
  else touch("document_tiles", draw);
}
