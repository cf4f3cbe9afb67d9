"use strict";
// Keys, search, copying, and the origin of the line under the pointer. Pages work without it.
const script = document.currentScript;
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// ---- to the next or previous block of a page
function below(part) { // pixels from where a part stands once it was gone to
  const aim = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop) || 0;
  return part.getBoundingClientRect().top - aim;
}
function go(part) {
  if (!part) return;
  for (let shut = part.closest("details"); shut; shut = shut.parentElement.closest("details")) shut.open = true;
  for (const other of all(".here")) other.classList.remove("here");
  part.classList.add("here");
  part.scrollIntoView({behavior: "instant"});
  part.tabIndex = -1;
  part.focus({preventScroll: true});
  tell(part);
}

// ---- the origin of a line
const telling = find(".telling");
function tell(run) {
  if (!telling || !run || !run.dataset.of) return;
  const from = find(".from", run);
  telling.hidden = false;
  telling.replaceChildren();
  const link = document.createElement(from.href ? "a" : "span");
  if (from.href) link.href = from.href;
  link.textContent = run.dataset.of;
  telling.append(link);
}
for (const kind of ["pointerover", "focusin", "click"]) {
  find(".script")?.addEventListener(kind, (event) => tell(event.target.closest(".run")));
}

// ---- the text of a chart's point: of the focused one, or of the one nearest to the pointer
function say(point) {
  const says = find(".says", point.closest("figure")), text = find("title", point)?.textContent;
  if (!says || !text || says.textContent === text) return;
  const to = point.closest("a"), shown = document.createElement(to ? "a" : "span");
  if (to) shown.href = to.href.baseVal;
  shown.textContent = text;
  says.replaceChildren(shown);
}
for (const chart of all(".chart")) {
  const links = all("a", chart); // Tab stops at one of them, from which arrows go to the others
  for (const link of links.slice(1)) link.setAttribute("tabindex", "-1");
  chart.addEventListener("keydown", (event) => {
    const at = links.indexOf(event.target.closest("a")), step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (at < 0 || !step || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = links[at + step] || links[at];
    links[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
  chart.parentElement.addEventListener("focusin", (event) => { // an svg that listens to it is a stop of its own
    if (links.includes(event.target.closest("a"))) say(event.target.closest("a"));
  });
  for (const kind of ["pointermove", "click"]) {
    chart.addEventListener(kind, (event) => {
      const away = (circle) => {
        const box = circle.getBoundingClientRect();
        return Math.hypot(event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2);
      };
      const [distance, circle] = all("circle", chart).map((one) => [away(one), one])
        .reduce((best, one) => one[0] < best[0] ? one : best, [24, null]);
      if (circle) say(circle.closest("a") || circle);
    });
  }
}

// ---- to a line of a script
const lines = find("[data-goto]");
if (lines) {
  lines.hidden = false;
  lines.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `L${find("input", lines).value}`;
  });
}

// ---- tables that can be sorted: by the number in data-by, else by the text; rows without come last
for (const button of all("table.sortable th button")) {
  button.disabled = false;
  button.addEventListener("click", () => {
    const head = button.parentElement, place = head.cellIndex, body = find("tbody", head.closest("table"));
    const falls = head.getAttribute("aria-sort") === "ascending", sign = falls ? -1 : 1;
    for (const other of all("th", head.parentElement)) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const by = (row) => row.cells[place].dataset.by ?? row.cells[place].textContent.trim();
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      if (!x || !y) return !x - !y;
      return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    });
    body.append(...rows);
  });
}

// ---- copying
for (const button of all("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const lines = all("code", document.getElementById(button.dataset.copy));
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(lines.map((line) => line.textContent + "\n").join(""));
      button.textContent = "Copied";
    } catch {
      button.textContent = "Your browser does not allow it: download the script";
    }
    setTimeout(() => { button.textContent = before; }, 2500);
  });
}

// ---- search
let dialog;
function search() {
  if (!dialog) {
    dialog = document.createElement("dialog");
    dialog.setAttribute("aria-label", "Search");
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "An idea, a record, a name, a command; or 14i line 300";
    field.setAttribute("aria-label", field.placeholder);
    dialog.append(field, document.createElement("p"), document.createElement("ul"));
    document.body.append(dialog);
    field.addEventListener("input", show);
    dialog.addEventListener("keydown", move);
    const index = document.createElement("script"); // fetch() fails from file://
    index.src = script.dataset.index;
    index.addEventListener("load", show);
    document.head.append(index);
  }
  if (!dialog.open) dialog.showModal();
  find("input", dialog).select();
}
const SMALL = new Set(("a an and are at by did do does for from how i in is it its many much of on or the to was were " +
  "what when where which who why with").split(" ")); // words of a question that name nothing
function rankOf(word, title, text, best) { // 0 is best; text begins with the title
  if (title.split(/[^\p{L}\p{N}.#]+/u).includes(word)) return 0;
  if (best.split(" ").includes(word)) return 0.4;
  if (title.includes(word)) return 1;
  if (` ${text} `.replace(/[^\p{L}\p{N}.#]+/gu, " ").includes(` ${word} `)) return 2;
  return text.includes(word) ? 3 : Infinity;
}
function show() {
  const typed = find("input", dialog).value.toLowerCase().replace(/[?,:"']/g, " ").split(/\s+/).filter(Boolean);
  const words = typed.filter((word) => !SMALL.has(word)).map((word) => word.replace(/^(record|idea)s$/, "$1"));
  const number = typed.length > 1 && typed.find((word) => /^l?[1-9]\d{1,3}$/.test(word) && word !== typed[0]) ||
    typed.includes("line") && typed.find((word) => /^\d+$/.test(word));
  const found = [];
  (window.searchIndex || []).forEach(([name, kind, about, path, more], place) => {
    const title = name.toLowerCase(), text = `${title} ${kind} ${about} ${more}`.toLowerCase();
    const best = (more.split(" | ")[1] || "").toLowerCase();
    const ranks = words.map((word) => rankOf(word, title, text, best));
    const sum = ranks.reduce((total, one) => total + one, 0) / (ranks.length || 1);
    const rank = kind === "milestone" ? sum / 4 : 0.15 + (kind === "person" ? sum / 2 : sum); // an idea counts like a title
    if (words.length && rank < Infinity) found.push({rank, place, name, kind, about, path});
    if (number && kind === "script" && typed.some((word) => word !== number && title === `lines of ${word}`)) {
      const line = number.replace("l", "");
      found.push({rank: -1, place, name: `Line ${line} of ${title.split(" ").at(-1)}`, kind, about, path: `${path}#L${line}`});
    }
  });
  found.sort((a, b) => a.rank - b.rank || a.place - b.place); // the index has the best kinds first
  find("p", dialog).textContent = !words.length ? "Type a word; ↓ goes to the results."
    : found.length ? `${found.length} found` : "Nothing found";
  find("ul", dialog).replaceChildren(...found.slice(0, 40).map((entry) => {
    const item = document.createElement("li"), link = document.createElement("a");
    const more = document.createElement("span");
    link.href = script.dataset.root + entry.path;
    link.textContent = entry.name;
    more.textContent = `${entry.kind}${entry.about ? " · " : ""}${entry.about}`;
    link.append(more);
    item.append(link);
    return item;
  }));
}
function move(event) {
  const links = all("a", dialog), at = links.indexOf(document.activeElement);
  if (event.key === "Escape") { // which by itself would only empty the field
    event.preventDefault();
    dialog.close();
  }
  if (event.key === "Enter" && at < 0 && links[0]) links[0].click();
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  event.preventDefault();
  const next = at + (event.key === "ArrowDown" ? 1 : -1);
  (links[next] || (next < 0 ? find("input", dialog) : links.at(-1)))?.focus();
}
for (const link of all("[data-search]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    search();
  });
}

// ---- keys
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.closest("input, textarea, dialog, .scroll, .model, .formula, pre")) return;
  const parts = all(".block, .run");
  if (event.key === "/" && script.dataset.index) {
    event.preventDefault();
    search();
  } else if (event.key === "ArrowLeft") find("link[rel=prev]") && location.assign(find("link[rel=prev]").href);
  else if (event.key === "ArrowRight") find("link[rel=next]") && location.assign(find("link[rel=next]").href);
  else if ("jn".includes(event.key)) go(parts.find((part) => below(part) > 2) || parts.at(-1));
  else if ("kp".includes(event.key)) go(parts.findLast((part) => below(part) < -2) || parts[0]);
  else if (event.key === "t") scrollTo({top: 0});
});
