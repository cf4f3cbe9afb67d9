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

// ---- the text of a chart's point
for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const point = event.target.closest?.(".chart a, .chart circle"), text = point && find("title", point);
    if (text) find(".says", point.closest("figure")).textContent = text.textContent;
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
    field.placeholder = "A milestone, a block or a hyperparameter";
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
function show() {
  const words = find("input", dialog).value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const [name, kind, about, path] of window.searchIndex || []) {
    const title = name.toLowerCase(), text = `${title} ${kind} ${about.toLowerCase()}`;
    if (words.length && words.every((word) => text.includes(word))) {
      const rank = title === words[0] ? 0 : title.split(/[ _]/).includes(words[0]) ? 1
        : title.startsWith(words[0]) ? 2 : title.includes(words[0]) ? 3 : 4;
      found.push({rank, name, kind, about, path});
    }
  }
  found.sort((a, b) => a.rank - b.rank);
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
  if (event.target.closest("input, textarea, dialog, .scroll, pre")) return;
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
