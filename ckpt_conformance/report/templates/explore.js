"use strict";
// Shows what a point of a crash map stands for. All text goes in as text, never as HTML.
const read = id => JSON.parse(document.getElementById(id).textContent);
const looks = read("looks");

const make = (tag, name, ...children) => {
  const one = document.createElement(tag);
  if (name) one.className = name;
  one.append(...children);
  return one;
};
const sign = (outcome, bad) => {
  const space = "http://www.w3.org/2000/svg";
  const one = document.createElementNS(space, "svg");
  one.setAttribute("class", `sign o o-${outcome}${bad ? " bad" : ""}`);
  one.setAttribute("viewBox", "0 0 22 22");
  one.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#o-${outcome}`);
  one.append(use);
  return one;
};
const after = column => {
  if (column.kind === "start") return "a crash before the first operation";
  const many = column.first !== column.last;
  const number = many ? `operations ${column.first} to ${column.last}` : `operation ${column.first}`;
  const marks = (column.marks || []).map(one => `${one.mark} step ${one.step}`).join(", ");
  const target = column.target ? ` → ${column.target}` : "";
  const what = marks || `${column.kind} ${column.path || "of the directory"}${target}`;
  return `a crash after ${number} (${what})`;
};

const file = one => make("li", one.gone ? "gone" : "",
  make("code", "", one.path), make("span", one.lost ? "lost" : "", one.told));
const files = state => {
  const list = make("ul", "files", ...state.files.map(file));
  if (!state.files.length) list.append(make("li", "", "The directory is empty."));
  if (state.more) list.append(make("li", "", `and ${state.more} more`));
  return list;
};
const facts = table => {
  const rows = Object.entries(table).filter(([, value]) => value);
  return make("dl", "", ...rows.map(
    ([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
};
const replay = (cell, data) => {
  if (!cell.bundle) return [];
  const [command, name] = data.replays[cell.bundle];
  const other = cell.simplest === undefined ? "" :
    `The simplest state that ends so was kept: a crash after operation ${cell.simplest}.`;
  const link = make("a", "", `bundles/${name}`);
  link.href = `bundles/${encodeURIComponent(name)}/violation.json`;
  const found = [make("h4", "", "Replay"), make("pre", "command", command), link];
  return other ? [...found, make("p", "soft", other)] : found;
};
const counts = cell => Object.entries(cell.counts).map(([name, n]) => `${name} ${n}`).join(", ");

const show = (section, data, row, number, line) => {
  const [model, cells] = data.rows[row];
  const cell = cells[number];
  const column = data.columns[number];
  const state = data.states[cell.state];
  const panel = section.querySelector(".panel");
  const close = make("button", "", "×");
  close.setAttribute("aria-label", "Close");
  close.addEventListener("click", () => hide(section));
  const verdict = cell.bad ? "violates" : "keeps the promise";
  panel.className = "panel";
  panel.replaceChildren(
    close,
    make("div", "head", sign(cell.worst, cell.bad),
      make("span", "told", `${cell.worst} under ${model}: ${verdict}`)),
    make("p", "soft", after(column)),
    facts({
      "May be served": state.promised,
      "The load gave": state.gave,
      "Meaning": looks[cell.worst].meaning,
      "Differs": (state.differs || []).join("; "),
      "State chosen": state.why,
      "Evidence": cell.grade,
      "All states here": counts(cell),
      "Source line": column.source,
    }),
    make("h4", "", "What was left"), files(state),
    ...replay(cell, data));
  line.after(panel); // beneath the line of the map that was chosen from
  section.querySelectorAll("use.on").forEach(one => one.classList.remove("on"));
  section.querySelectorAll(`use[data-r="${row}"][data-c="${number}"]`)
    .forEach(one => one.classList.add("on"));
};
const hide = section => {
  const panel = section.querySelector(".panel");
  panel.className = "panel empty";
  panel.replaceChildren();
  section.querySelectorAll("use.on").forEach(one => one.classList.remove("on"));
};

const STEPS = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
// The next cell in a direction; rows end where the map does, dots are passed over.
const next = (cells, at, [down, right]) => {
  const key = one => [Number(one.dataset.r), Number(one.dataset.c)];
  const [row, column] = key(at);
  const ahead = cells.filter(one => {
    const [r, c] = key(one);
    return right ? r === row && (c - column) * right > 0 : c === column && (r - row) * down > 0;
  });
  const far = one => Math.abs(key(one)[0] - row) + Math.abs(key(one)[1] - column);
  return ahead.sort((one, other) => far(one) - far(other))[0];
};

const enliven = (section, size) => {
  const data = read(section.dataset.map);
  const cells = [...section.querySelectorAll(`svg.${size} use[data-c]`)];
  const first = cells.find(one => one.classList.contains("bad")) || cells[0];
  for (const one of cells) {
    const [model, row] = data.rows[one.dataset.r];
    const cell = row[one.dataset.c];
    const told = `${model}, ${after(data.columns[one.dataset.c])}: ${cell.worst}`;
    one.setAttribute("role", "button");
    one.setAttribute("aria-label", cell.bad ? `${told}, violates` : told);
    one.setAttribute("tabindex", one === first ? "0" : "-1");
    const here = () => {
      show(section, data, Number(one.dataset.r), Number(one.dataset.c), one.ownerSVGElement);
      one.scrollIntoView({block: "nearest"}); // the panel may have been above it
    };
    one.addEventListener("click", here);
    one.addEventListener("focus", here);
    one.addEventListener("keydown", event => {
      if (event.key === "Escape") hide(section);
      if (event.key === "Enter" || event.key === " ") here();
      const other = STEPS[event.key] && next(cells, one, STEPS[event.key]);
      if (other) {
        one.setAttribute("tabindex", "-1");
        other.setAttribute("tabindex", "0");
        other.focus();
      }
      if (STEPS[event.key] || event.key === " ") event.preventDefault();
    });
  }
};

for (const section of document.querySelectorAll(".work")) {
  enliven(section, "wide");
  enliven(section, "narrow");
}
