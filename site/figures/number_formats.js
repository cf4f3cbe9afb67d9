"use strict";
{
  const FORMATS = {e4m3: [3, -6, 448], e5m2: [2, -14, 57344]}; // mantissa bits, smallest exponent, largest
  const SAMPLES = 281, round = Math.fround;

  // scale * x, clamped to the range of the format and rounded to it, to an even mantissa in a tie.
  function quantize(x, scale, format) {
    const [mantissa, lowest, largest] = FORMATS[format];
    const y = Math.max(-largest, Math.min(largest, round(round(scale) * round(x))));
    if (y === 0) return 0;
    const step = 2 ** (Math.max(lowest, Math.floor(Math.log2(Math.abs(y)))) - mantissa);
    const down = Math.floor(y / step), rest = y / step - down;
    return (rest > 0.5 || (rest === 0.5 && down % 2) ? down + 1 : down) * step;
  }
  const float = new Float32Array(1), word = new Uint32Array(float.buffer);
  function bitsOf(number) { float[0] = number; return word[0]; }
  function numberOf(bits) { word[0] = bits; return float[0]; }
  // The upper 16 bits of a float32 number, as the bits of a bfloat16, and the lower, as an int16.
  const split = (number) => [bitsOf(number) >>> 16, bitsOf(number) << 16 >> 16];
  const join = (upper, lower) => numberOf((upper << 16 | lower & 0xFFFF) >>> 0);
  function rounded(number) { // to the nearest bfloat16
    const bits = bitsOf(number);
    return numberOf((bits + 0x7FFF + (bits >>> 16 & 1) >>> 16 << 16) >>> 0);
  }
  // A weight of 1 after `count` updates: in float32, in bfloat16, in bfloat16 and a remainder.
  function updated(update, count) {
    let plain = 1, short = 1, [upper, lower] = split(1);
    for (let i = 0; i < count; i++) {
      plain = round(plain - round(update));
      short = rounded(round(short - round(update)));
      [upper, lower] = split(round(join(upper, lower) - round(update)));
    }
    return [plain, short, join(upper, lower)];
  }
  const size = (v) => Number.isInteger(v) && v < 1e5 ? v.toLocaleString("en") : v >= 1e-3 && v < 1e4 ? String(+v.toPrecision(3)) : v.toExponential(1).replace(".0", "");

  function draw(all, {use, power, shift, update, count}, own) {
    const {name, format} = own[use], number = round(10 ** power), step = 10 ** update;
    let scale = own[use].scale * 2 ** shift;
    if (shift && Math.round(Math.log2(scale)) === 0) scale = 1; // the slider passes it: no scale
    const x = (v) => (40 + (Math.log10(v) + 9) / 14 * 372).toFixed(1), y = (v) => (210 - 180 * v).toFixed(1);
    const error = (v) => Math.abs(quantize(v, scale, format) / scale / v - 1);
    const [mantissa, lowest, largest] = FORMATS[format];
    [size(number), size(scale), size(step), count].forEach((value, i) => { all(".value")[i].textContent = value; });
    all(".range")[0].textContent = `full precision: ${size(2 ** lowest / scale)} to ${size(largest / scale)}; 0 below ${size(2 ** (lowest - mantissa - 1) / scale)}`;
    all(".key")[0].setAttribute("points", Array.from({length: SAMPLES}, (_, i) => round(10 ** (i / 20 - 9)))
      .map((v) => `${x(v)},${y(error(v))}`).join(" "));
    all(".one")[0].setAttribute("d", `M${x(number)} 24V214`);
    const weights = updated(step, count);
    weights.forEach((weight, row) => {
      all(".weight")[row].textContent = weight.toFixed(6);
      all(".bits")[row].setAttribute("d", bitsOf(weight).toString(2).padStart(32, "0").split("")
        .map((bit, i) => bit === "1" ? `M${(4 + 12.75 * i).toFixed(2)} ${54 + 66 * row}h11.75v18h-11.75z` : "").join(""));
    });
    const kept = quantize(number, scale, format), wrong = error(number) > 0.999 ? "an error of over 99.9%" : `an error of ${(100 * error(number)).toFixed(1)}%`;
    const fate = kept === 0 ? "underflow" : number * scale > largest ? `clamped, ${wrong}` : wrong;
    all(".says")[0].textContent = `${name}: ${size(number)} times ${size(scale)} is stored as ${size(kept)}, so ${size(kept / scale)} `
      + `comes back: ${fate}. After ${count} updates of ${size(step)}, a weight of 1 is `
      + `${weights[0].toFixed(6)} in float32, ${weights[1].toFixed(6)} in bfloat16 alone and ${weights[2].toFixed(6)} with the remainder.`;
  }
  if (typeof module === "object") module.exports = {quantize, split, join, updated};
  else touch("number_formats", draw);
}
