"use strict";
{
  const COUNT = 16, LOW = 0.68, HIGH = 1.2; // values; the band in which 01's rounds end

  // A singular value of a matrix of Frobenius norm 1 after `count` rounds of a method.
  function rounds({polynomials, margin, repeats}, value, count) {
    let v = value / margin;
    for (let i = 0; i < count && (repeats || i < polynomials.length); i++) {
      const [a, b, c] = polynomials[i % polynomials.length], square = v * v;
      v *= a + square * (b + c * square);
    }
    return v;
  }
  // Values from 1 down to ratio, divided by their Frobenius norm, as the scripts divide them.
  function spectrum(ratio) {
    const values = Array.from({length: COUNT}, (_, i) => ratio ** (i / (COUNT - 1)));
    const norm = Math.hypot(...values);
    return values.map((v) => v / norm);
  }
  const products = ({polynomials, repeats, products}, count) =>
    products * (repeats ? count : Math.min(count, polynomials.length));
  const trackX = (v) => 20 + (Math.log10(Math.max(v, 1e-4)) + 4) / (Math.log10(2.1) + 4) * 392;
  const mapX = (v) => 28 + (Math.log10(v) + 4) / 4 * 384;
  const mapY = (v) => 252 - v / 2.1 * 238;
  const short = (v) => v < 0.1 ? v.toPrecision(2) : v.toFixed(2);

  function draw(all, {count, power}, methods) {
    const ratio = 10 ** power, before = spectrum(ratio), says = [];
    const dots = all(".dot"), results = all(".result"), curves = all(".map"), outputs = all(".value");
    outputs[0].textContent = count;
    outputs[1].textContent = String(+ratio.toPrecision(2));
    methods.forEach((method, row) => {
      const after = before.map((v) => rounds(method, v, count));
      const inside = after.map((v) => +v.toFixed(2)).filter((v) => v >= LOW && v <= HIGH).length;
      const range = `${short(Math.min(...after))} to ${short(Math.max(...after))}`;
      after.forEach((v, i) => dots[row * COUNT + i].setAttribute("cx", trackX(v).toFixed(1)));
      results[row].textContent = `${inside} of ${COUNT} in the band · ${range} · ${products(method, count)} products`;
      curves[row].setAttribute("points", Array.from({length: 385}, (_, i) => 10 ** (i / 96 - 4))
        .map((v) => `${mapX(v).toFixed(1)},${mapY(rounds(method, v, count)).toFixed(1)}`).join(" "));
      says.push(`${method.name} ${inside} (${range})`);
    });
    all(".says")[0].textContent = `After ${count} round${count === 1 ? "" : "s"}, of ${COUNT} values in the band: ${says.join("; ")}.`;
  }
  if (typeof module === "object") module.exports = {rounds, spectrum};
  else touch("newton_schulz", draw);
}
