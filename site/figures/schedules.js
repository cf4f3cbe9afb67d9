"use strict";
{
  const PANELS = ["rate", "momentum", "window", "tokens", "targets"], BOTTOM = [0, 0.8, 0, 0, 0];
  const whole = (v) => Math.round(v).toLocaleString("en");
  const FORMAT = [(v) => v.toFixed(2), (v) => v.toFixed(3), whole, whole, (v) => v.toFixed(2)];

  // The value at a step of a schedule [first step, value, last step, value, ...] of straight pieces.
  function valueAt(pieces, step) {
    for (let i = 0; i < pieces.length; i += 4) {
      const [first, before, last, after] = pieces.slice(i, i + 4);
      if (step <= last) return before + (first === last ? 0 : (after - before) * (step - first) / (last - first));
    }
    return null; // the run is over
  }
  // The tokens of all steps before this one; a piece has the same number in each of its steps.
  function tokensBefore({tokens}, step) {
    let sum = 0;
    for (let i = 0; i < tokens.length; i += 4) sum += tokens[i + 1] * Math.max(0, Math.min(step, tokens[i + 2] + 1) - tokens[i]);
    return sum;
  }
  function draw(all, {first, second, step}, own) {
    const two = [own[first], own[second]], longest = Math.max(two[0].steps, two[1].steps);
    step = Math.min(step, longest - 1);
    all("[name=step]")[0].setAttribute("max", longest - 1);
    all(".value")[0].textContent = whole(step);
    const x = (at) => (58 + at / longest * 238).toFixed(1), says = two.map(() => []);
    all("svg").forEach((svg, i) => {
      const name = PANELS[i], values = two.map((m) => m[name] || []);
      const top = Math.max(...values.flatMap((pieces) => pieces.filter((_, j) => j % 2))), bottom = BOTTOM[i];
      const y = (v) => (116 - (v - bottom) / (top - bottom || 1) * 76).toFixed(1);
      const set = (part, text) => { svg.querySelector(part).textContent = text; };
      [".dashes", ".key"].forEach((look, k) => svg.querySelector(look).setAttribute("points",
        values[k].map((v, j, list) => j % 2 ? "" : `${x(v)},${y(list[j + 1])}`).filter(Boolean).join(" ")));
      svg.querySelector(".one").setAttribute("d", `M${x(step)} 34V120`);
      const now = values.map((pieces) => !pieces.length ? "none" : valueAt(pieces, step))
        .map((v) => v === null ? "over" : v === "none" ? v : FORMAT[i](v));
      svg.querySelectorAll(".now").forEach((part, k) => { part.textContent = `${two[k].id} ${now[k]}`; });
      set(".most", top > bottom ? FORMAT[i](top) : "");
      set(".last", whole(longest));
      now.forEach((text, k) => says[k].push(text));
    });
    all(".says")[0].textContent = `Step ${whole(step)}: ` + two.map((m, k) => {
      const [rate, momentum, window, tokens, targets] = says[k], read = (tokensBefore(m, step) / 1e6).toFixed(0);
      return `${m.id} has read ${read}M tokens` + (step < m.steps ? `; rate ${rate}, momentum ${momentum}, window `
        + `${window.replace("none", "none (a token sees all earlier ones)")}, ${tokens} tokens per step, further targets ${targets}.` : ` and is over after ${whole(m.steps)} steps.`);
    }).join(" ");
  }
  if (typeof module === "object") module.exports = {valueAt, tokensBefore};
  else touch("schedules", draw);
}
