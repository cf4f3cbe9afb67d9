"use strict";
{
  const RANKS = 8, WIDTH = 768, VOCAB = 50304, TABLE_MS = 0.4, KINDS = ["tables", "matrices", "grads", "results", "padding"];
  const ALL_REDUCE = 2 * (RANKS - 1) / RANKS, ONE_WAY = (RANKS - 1) / RANKS; // what a rank sends of a tensor
  const range = (count) => Array.from({length: count}, (_, i) => i);
  const share = (count) => Math.ceil(count / RANKS);
  const dealt = (count) => range(RANKS).map((rank) => Math.max(0, Math.min(share(count), count - rank * share(count))));

  // What a step does: ["compute", kind, units of each rank], ["send", kind, bytes] or ["wait", number
  // of the send]. A square matrix is 1 unit, one of the MLP 3; the embedding is counted in its own.
  function plan(mode, layers, width = WIDTH, vocab = VOCAB) {
    const steps = [], sizes = [[4 * layers, width ** 2, 1], [2 * layers, 4 * width ** 2, 3]];
    const table = 4 * vocab * width, matrices = sizes.reduce((sum, [count, size]) => sum + count * size, 0);
    let sends = 0;
    const send = (kind, bytes) => { steps.push(["send", kind, bytes]); return sends++; };
    const wait = (...which) => which.forEach((i) => steps.push(["wait", i]));
    const compute = (kind, units) => steps.push(["compute", kind, units]);
    if (mode < 3) { // all gradients to all
      wait(send(2, ALL_REDUCE * table), send(2, ALL_REDUCE * 4 * matrices));
      compute(0, Array(RANKS).fill(1));
    } else { // a rank gets and updates its rows of the embedding
      wait(send(2, ONE_WAY * table));
      compute(0, Array(RANKS).fill(1 / RANKS));
      wait(send(3, ONE_WAY * table));
    }
    if (mode === 3) wait(send(2, ALL_REDUCE * 4 * matrices));
    if (mode === 0) compute(1, Array(RANKS).fill(10 * layers));
    if (mode === 1) { // matrix i belongs to rank i mod 8; a layer has four small ones, then two large
      const owned = Array(RANKS).fill(0);
      for (const i of range(6 * layers)) owned[i % RANKS] += i % 6 < 4 ? 1 : 3;
      compute(1, owned);
      wait(send(3, ALL_REDUCE * 2 * matrices));
    }
    if (mode < 2) return steps;
    const scatters = sizes.map(([count, size]) => mode === 4 && send(2, ONE_WAY * 4 * RANKS * share(count) * size));
    const gathers = sizes.map(([count, size, units], i) => {
      if (mode === 4) wait(scatters[i]);
      compute(1, dealt(count).map((n) => n * units));
      // 07 pads with zeros, which cost as much as matrices
      if (mode === 4) compute(4, dealt(count).map((n) => (share(count) - n) * units));
      return send(3, ONE_WAY * (mode === 4 ? 4 : 2) * RANKS * share(count) * size);
    });
    wait(...gathers);
    return steps;
  }
  // Times in ms: {total, bars: [kind, rank or -1 for all, start, end], sent: bytes, idle: a share}.
  function simulate(steps, link, unit) {
    const clocks = Array(RANKS).fill(0), ends = [], bars = [];
    let free = 0, sent = 0, busy = 0;
    for (const [what, kind, amount] of steps) {
      if (what === "send") { // it starts when all ranks have come to it and the link is free
        const start = Math.max(free, ...clocks);
        free = start + amount / link / 1e6;
        sent += amount;
        ends.push(free);
        bars.push([kind, -1, start, free]);
      } else clocks.forEach((clock, rank) => {
        if (what === "wait") clocks[rank] = Math.max(clock, ends[kind]);
        else {
          clocks[rank] += amount[rank] * (kind ? unit : TABLE_MS);
          if (kind !== 4) busy += clocks[rank] - clock;
          bars.push([kind, rank, clock, clocks[rank]]);
        }
      });
    }
    const total = Math.max(...clocks);
    return {total, bars, sent, idle: 1 - busy / RANKS / total};
  }
  function draw(all, {mode, link, work, layers}, own) {
    const every = own.map((_, i) => simulate(plan(i, layers), link, work / 10)), now = every[+mode];
    const most = Math.max(...every.map((run) => run.total)), x = (ms) => (48 + ms / most * 364).toFixed(1);
    [link, work, layers].forEach((value, i) => { all(".value")[i].textContent = value; });
    const paths = KINDS.map(() => "");
    for (const [kind, rank, start, end] of now.bars) for (const row of start === end ? [] : rank < 0 ? range(RANKS) : [rank]) {
      paths[kind] += `M${x(start)} ${4 + 25 * row + (rank < 0 ? 11 : 0)}H${x(end)}v${rank < 0 ? 7 : 11}H${x(start)}z`;
    }
    KINDS.forEach((kind, i) => all(`.${kind}`)[0].setAttribute("d", paths[i]));
    all(".most")[0].textContent = `${most.toFixed(1)} ms`;
    all(".says")[0].textContent = `${own[+mode]}: the step takes ${now.total.toFixed(1)} ms. Each GPU sends ${Math.round(now.sent / 1e6)} MB; `
      + `on average it updates no weights in ${Math.round(100 * now.idle)}% of the time. With the same settings: `
      + own.map((id, i) => `${id} ${every[i].total.toFixed(1)} ms`).join(", ") + ".";
  }
  if (typeof module === "object") module.exports = {plan, simulate, step: (mode, layers, link, unit) => simulate(plan(mode, layers), link, unit)};
  else touch("eight_lanes", draw);
}
