/* Popovers, the switch between the whole file and new lines, folded lines, filters, copy buttons. */
"use strict";

// ---- Popovers: an equation, or a line of code.

function content(link) {
  const target = document.getElementById(link.hash.slice(1));
  if (link.classList.contains("eqref")) return target?.cloneNode(true);
  const box = document.createElement("div");
  box.className = "highlight";
  const copy = box.appendChild(document.createElement("pre"));
  if (target) copy.append(...[...target.cloneNode(true).childNodes]);
  return box;
}

function setUpTips() {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const link = event.target.closest?.(".eqref, .toline");
    const inside = link && !tip.contains(link) && content(link);
    if (!inside) return;
    tip.replaceChildren(inside);
    for (const node of tip.querySelectorAll("[id], [tabindex]")) {
      node.removeAttribute("id");
      node.removeAttribute("tabindex");
    }
    link.setAttribute("aria-describedby", "tip");
    tip.hidden = false;
    const at = link.getBoundingClientRect();
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(at.left, room)) + scrollX}px`;
    const above = at.bottom + tip.offsetHeight + 12 > innerHeight;
    tip.style.top = `${(above ? at.top - tip.offsetHeight - 6 : at.bottom + 6) + scrollY}px`;
  };
  hide();
  for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, show);
  for (const kind of ["mouseout", "focusout"]) document.addEventListener(kind, hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}

// ---- The source: whole, or only what is new

function view(name) {
  for (const pre of document.querySelectorAll(".source")) {
    pre.classList.toggle("new-only", name === "new");
  }
  for (const fold of document.querySelectorAll(".fold")) fold.setAttribute("aria-expanded", false);
  for (const button of document.querySelectorAll(".switch button")) {
    button.setAttribute("aria-pressed", button.dataset.view === name);
  }
  const docstring = document.querySelector(".docstring");
  if (docstring) docstring.open = name === "new";
}

function setUpSource() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.view) view(button.dataset.view);
    if (button?.classList.contains("fold")) {
      button.setAttribute("aria-expanded", button.getAttribute("aria-expanded") === "false");
    }
  });
  addEventListener("hashchange", arrive);
  arrive();
}

function arrive() {
  // Open what the address names: a diff, new lines, or a line that is folded.
  const target = document.getElementById(location.hash.slice(1));
  if (location.hash === "#new") view("new");
  if (target?.matches("details")) target.open = true;
  if (target?.matches(".line")) {
    if (!target.offsetParent) view("whole");
    const around = target.closest("details");
    if (around) around.open = true;
    target.scrollIntoView({ block: "center" });
  }
}

// ---- Tables whose rows can be filtered by their data

function filterRows(rows, chosen) {
  for (const row of rows) {
    row.hidden = Object.entries(chosen).some(([name, x]) => x && row.dataset[name] !== x);
  }
}

function addFilters(table) {
  const rows = [...table.tBodies[0].rows], chosen = {};
  const filters = table.dataset.filters.split(" ").map((name) => {
    const values = [...new Set(rows.map((row) => row.dataset[name]))].sort();
    return choice(name, [["", "all"], ...values.map((x) => [x, x])], "", (x) => {
      chosen[name] = x;
      filterRows(rows, chosen);
    });
  });
  table.parentNode.before(element("div", { class: "controls" }, ...filters));
}

// ---- Commands

function addCopyButton(box) {
  const button = box.appendChild(document.createElement("button"));
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(box.querySelector("code").textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(box.querySelector("code"));    // without permission
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}

document.addEventListener("DOMContentLoaded", () => {
  setUpTips();
  setUpSource();
  document.querySelectorAll(".command").forEach(addCopyButton);
  document.querySelectorAll("[data-filters]").forEach(addFilters);
});
