/* Learning curves: one algorithm with its seeds, a bug beside the clean file, and the explorer of
   all published runs. */
"use strict";

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255",
  "#999933", "#888888"];
const POINTS = 100;

// ---- Numbers

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const format = (value) => Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en")
  : String(Number(value.toPrecision(3)));

function interpolate(xs, ys, x) {
  // Linear between points; null before the first, the last value after the last.
  if (!xs.length || x < xs[0]) return null;
  let k = xs.findIndex((other) => other >= x);
  if (k < 0) return ys[ys.length - 1];
  if (k === 0) return ys[0];
  return ys[k - 1] + (ys[k] - ys[k - 1]) * (x - xs[k - 1]) / (xs[k] - xs[k - 1]);
}

const smoothed = (ys, width) => ys.map((_, k) => mean(ys.slice(Math.max(0, k - width + 1), k + 1)));

function onGrid(line, seeds, axis, width) {
  // Return the x-axis and, for each seed, its return at these x.
  const scale = (seed) => axis === "seconds" ? seed.seconds / line.steps : 1;
  const ends = seeds.map((seed) => line.steps * scale(seed));
  const grid = Array.from({ length: POINTS }, (_, k) => Math.max(...ends) * (k + 1) / POINTS);
  const rows = seeds.map((seed, i) => {
    const xs = seed.x.map((x) => x * scale(seed));
    const ys = smoothed(seed.y, width);
    return grid.map((x) => x > ends[i] * 1.001 ? null : interpolate(xs, ys, x));
  });
  return { grid, rows };
}

function band(values, kind) {
  // Return the centre and the two ends of an interval over seeds.
  const centre = mean(values);
  if (kind === "none" || values.length < 2) return [centre, centre, centre];
  if (kind === "range") return [centre, Math.min(...values), Math.max(...values)];
  if (kind === "sd") {
    const squares = values.map((value) => (value - centre) ** 2);
    const sd = Math.sqrt(squares.reduce((a, b) => a + b) / (values.length - 1));
    return [centre, centre - sd, centre + sd];
  }
  let state = 1;      // the same draws each time: minimal standard generator
  const draw = () => (state = state * 48271 % 2147483647) / 2147483647;
  const means = Array.from({ length: 300 }, () =>
    mean(values.map(() => values[Math.floor(draw() * values.length)]))).sort((a, b) => a - b);
  return [centre, means[7], means[292]];
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high * 1.0001; k++) found.push(k * step);
  return found;
}

// ---- Drawing

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function draw(svg, series, anchors, axis, empty = 1) {
  // series: [{grid, y: [centre, low, high] or null, colour, thin, name}]; anchors: [{y, strong}]
  // empty: where the x-axis ends if there is no series
  const width = Math.max(300, svg.parentNode.clientWidth), height = Math.min(380, width * .62);
  const [left, right, top, bottom] = [58, 12, 28, 40];
  const values = series.flatMap((one) => one.y.flatMap((y) => y ?? []));
  const all = [...values, ...anchors.map((anchor) => anchor.y)];
  let low = Math.min(...all), high = Math.max(...all);
  if (!all.length) [low, high] = [0, 1];
  const pad = (high - low || 1) * .05;
  [low, high] = [low - pad, high + pad];
  const ends = series.flatMap((one) => one.grid.filter((_, k) => one.y[k]));
  const end = ends.length ? Math.max(...ends) : empty;
  const X = (x) => (left + x / end * (width - left - right)).toFixed(1);
  const Y = (y) => (top + (high - y) / (high - low) * (height - top - bottom)).toFixed(1);
  const unit = axis === "seconds" ? "seconds" : "environment steps";
  const parts = [];
  for (const y of ticks(low, high, 7)) {
    parts.push(`<path class="grid" d="M${left},${Y(y)}H${width - right}"/>
      <text x="${left - 8}" y="${+Y(y) + 4}" text-anchor="end">${format(y)}</text>`);
  }
  for (const x of ticks(0, end, width < 500 ? 3 : 6)) {
    const label = axis !== "seconds" && x >= 1000 ? `${format(x / 1000)}k` : format(x);
    parts.push(`<text x="${X(x)}" y="${height - bottom + 18}" text-anchor="middle">
      ${label.replace(/,000k$/, "M")}</text>`);
  }
  parts.push(`<text x="${(left + width - right) / 2}" y="${height - 4}" text-anchor="middle">
    ${unit}</text><text x="4" y="12">episode return</text>`);
  for (const anchor of anchors) {
    parts.push(`<path d="M${left},${Y(anchor.y)}H${width - right}" stroke="currentColor"
      stroke-dasharray="3 4" opacity="${anchor.strong ? 1 : .35}" class="anchor"
      stroke-width="${anchor.strong ? 2 : 1}"/>`);
  }
  for (const one of series) {
    const there = one.grid.map((x, k) => [x, one.y[k]]).filter(([, y]) => y);
    const path = (k) => there.map(([x, y]) => `${X(x)},${Y(y[k])}`);
    if (!one.thin && there.some(([, y]) => y[1] !== y[2])) {
      parts.push(`<path d="M${[...path(1), ...path(2).reverse()].join("L")}Z" opacity=".18"
        style="fill: ${one.colour}"/>`);
    }
    parts.push(`<path d="M${path(0).join("L")}" class="curve"
      style="fill: none; stroke: ${one.colour}"
      stroke-width="${one.thin ? 1.2 : 2.6}" opacity="${one.thin ? .75 : 1}"
      stroke-linejoin="round"><title>${one.name}</title></path>`);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
}

function picture(label) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  return element("div", { class: "picture" }, svg);
}

function choice(label, options, chosen, change) {
  const select = element("select");
  for (const [value, text] of options) select.append(element("option", { value }, text));
  select.value = chosen;
  select.addEventListener("change", () => change(select.value));
  return element("label", {}, `${label} `, select);
}

function toggle(text, colour, pressed, click) {
  const button = element("button", { "aria-pressed": pressed, style: `--key: ${colour}` }, text);
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    click(on);
  });
  return button;
}

function keepFocus(root, change) {
  // Put the focus back on the control that `change` replaces by one like it.
  const all = () => [...root.querySelectorAll("select, input, button")];
  const at = all().indexOf(document.activeElement);
  change();
  if (at >= 0) all()[Math.min(at, all().length - 1)]?.focus();
}

const nameOf = (line) => `${line.library === "plainrl" ? "" : `${line.library} `}${line.algo}` +
  `${line.settings === "default" ? "" : ` ${line.settings}`}` +
  `${line.folder === "results" ? "" : ` (${line.folder})`}`;
const AXES = [["steps", "steps"], ["seconds", "seconds"]];
const WIDTHS = [[1, "none"], [3, "3 points"], [10, "10 points"], [20, "20 points"]];
const BANDS = [["sd", "standard deviation"], ["range", "all seeds"], ["boot", "95% bootstrap"],
  ["none", "none"]];

function withMean(line, seeds, state, colour) {
  const { grid, rows } = onGrid(line, seeds, state.axis, Number(state.width));
  const centre = grid.map((_, k) => {
    const values = rows.map((row) => row[k]).filter((y) => y !== null);
    return values.length === rows.length && rows.length ? band(values, state.band) : null;
  });
  return { grid, rows, all: { grid, y: centre, colour, name: `mean of ${nameOf(line)}` } };
}

// ---- One algorithm

function showAlgorithm(root) {
  const lines = (window.CURVES?.[root.dataset.algo] ?? [])
    .map((line) => ({ ...line, algo: root.dataset.algo }))
    .filter((line) => line.seeds.some((seed) => seed.x.length));
  if (!lines.length) {
    root.append(element("p", { class: "note" }, "There is no stored learning curve."));
    return;
  }
  const state = { axis: "steps", width: 3, band: "sd" };
  const envs = [...new Set(lines.map((line) => line.env))];
  const first = lines.find((line) => line.env.startsWith("HalfCheetah")) ?? lines[0];
  root.replaceChildren();
  const controls = root.appendChild(element("div", { class: "controls" }));
  const box = root.appendChild(picture(`Learning curves of ${root.dataset.algo}`));
  const below = root.appendChild(element("div"));
  const pick = (line) => {
    const off = new Set(), shown = new Set();
    let strong = -1;
    const redraw = () => {
      const seeds = line.seeds.filter((seed) => !off.has(seed.seed));
      const { grid, rows, all } = withMean(line, seeds, state, "var(--accent)");
      const each = rows.map((row, i) => ({ grid, y: row.map((y) => y === null ? null : [y, y, y]),
        thin: true, name: `seed ${seeds[i].seed}`,
        colour: COLOURS[line.seeds.indexOf(seeds[i]) % COLOURS.length] }));
      const anchors = line.anchors.map(([y], k) => ({ y, strong: k === strong }))
        .filter((_, k) => shown.has(k));
      draw(box.firstChild, seeds.length ? [...each, all] : [], anchors, state.axis, line.steps);
    };
    const same = lines.filter((other) => other.env === line.env);
    keepFocus(controls, () => controls.replaceChildren(
      choice("environment", envs.map((env) => [env, env]), line.env,
        (env) => pick(lines.find((other) => other.env === env))),
      choice("runs", same.map((other, k) => [k, `${nameOf(other)}, ${format(other.steps)} steps`]),
        same.indexOf(line), (k) => pick(same[k])),
      choice("x-axis", AXES, state.axis, (axis) => { state.axis = axis; redraw(); }),
      choice("smoothing", WIDTHS, state.width, (width) => { state.width = width; redraw(); })));
    const seeds = element("div", { class: "keys" }, ...line.seeds.map((seed, k) =>
      toggle(`seed ${seed.seed}: ${format(seed.ends ?? seed.eval)}`,
        COLOURS[k % COLOURS.length], true, (on) => {
          on ? off.delete(seed.seed) : off.add(seed.seed);
          redraw();
        })));
    const keys = line.anchors.map(([y, source, what, training], k) => {
      if (training) shown.add(k);
      const button = toggle(`${format(y)} · ${source}, ${what}`, "currentColor", training,
        (on) => { on ? shown.add(k) : shown.delete(k); redraw(); });
      for (const kind of ["mouseenter", "focus"]) {
        button.addEventListener(kind, () => { strong = k; redraw(); });
      }
      return button;
    });
    const anchors = [[true, "Training returns that others published (dashed), at nearly the same " +
      "number of steps and partly on other versions of the environment:"], [false, "Evaluations " +
      "that others published. They are not drawn at first, because the curves are training " +
      "returns:"]].flatMap(([training, text]) => {
      const group = keys.filter((_, k) => line.anchors[k][3] === training);
      return group.length ? [element("p", { class: "note" }, text),
        element("div", { class: "keys" }, ...group)] : [];
    });
    const command = element("div", { class: "command" }, element("code", {}, line.command));
    addCopyButton(command);
    const made = { "-": "", this: " Made by today's code." }[line.code] ??
      ` The older commit that made them: ${line.code}.`;
    below.replaceChildren(
      element("p", { class: "note" }, "Thick: the mean over the chosen seeds, with its standard " +
        "deviation. A seed's number is its mean return over the last tenth of its training."),
      seeds,
      ...anchors,
      element("p", { class: "note" },
        `The command that trains the first run. Other seeds: --seed.${made}`), command);
    redraw();
    pick.redraw = redraw;
  };
  pick(first);
  new ResizeObserver(() => pick.redraw()).observe(root);
}

// ---- A bug beside the clean file

function showPair(root) {
  const { steps, curves } = JSON.parse(root.dataset.pair);
  const series = curves.map((ys, i) => ({ name: ["clean", "planted"][i], colour: COLOURS[i],
    grid: ys.map((_, k) => steps * (k + 1) / ys.length),
    y: ys.map((y) => y === null ? null : [y, y, y]) })).filter((one) => one.y.some((y) => y));
  const box = root.appendChild(picture("Learning curves of the clean and the planted file"));
  root.append(element("div", { class: "keys" }, ...series.map((one) =>
    element("span", { style: `--key: ${one.colour}` }, one.name))));
  new ResizeObserver(() => draw(box.firstChild, series, [], "steps", steps)).observe(box);
}

// ---- The explorer

function usualBudget(lines) {
  // Return the number of steps of most of the main results, or else of most lines; the larger of
  // two such numbers.
  const main = lines.filter((line) => line.folder === "results");
  const count = new Map();
  for (const line of main.length ? main : lines) {
    count.set(line.budget, (count.get(line.budget) ?? 0) + 1);
  }
  return [...count].sort(([a, n], [b, m]) => m - n || b - a)[0][0];
}

function showExplorer(root) {
  const lines = Object.entries(window.CURVES ?? {}).flatMap(([algo, found]) =>
    found.map((line) => ({ ...line, algo, budget: Number(line.steps.toPrecision(2)) })))
    .filter((line) => line.seeds.some((seed) => seed.x.length));
  const envs = [...new Set(lines.map((line) => line.env))].sort();
  const keys = ["env", "budget", "axis", "width", "band", "lines"];
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const state = { env: "HalfCheetah-v4", budget: "", axis: "steps", width: "3", band: "sd",
      lines: "" };
    for (const key of keys) if (given.has(key)) state[key] = given.get(key);
    if (!envs.includes(state.env)) state.env = envs[0];
    return state;
  };
  let state = read();
  const write = () => {
    keepFocus(root, show);
    const chosen = keys.filter((key) => state[key] !== "").map((key) => [key, state[key]]);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
  };
  const controls = root.appendChild(element("div", { class: "controls" }));
  const box = root.appendChild(picture("Learning curves of the chosen lines"));
  const below = root.appendChild(element("div"));
  const list = root.appendChild(element("div", { class: "lines" }));
  function show() {
    const here = lines.filter((line) => line.env === state.env);
    const budgets = [...new Set(here.map((line) => line.budget))].sort((a, b) => b - a);
    if (!budgets.includes(Number(state.budget))) state.budget = usualBudget(here);
    const found = here.filter((line) => line.budget === Number(state.budget));
    const asked = state.lines.split("|");
    let chosen = found.filter((line) => asked.includes(nameOf(line)));
    if (!state.lines) {
      const ours = found.filter((line) => line.library === "plainrl" && line.folder === "results");
      chosen = (ours.length ? ours : found).slice(0, 6);
    }
    const set = (key) => (value) => { state[key] = value; write(); };
    controls.replaceChildren(
      choice("environment", envs.map((env) => [env, env]), state.env,
        (env) => { state.env = env; state.budget = state.lines = ""; write(); }),
      choice("steps", budgets.map((steps) => [steps, format(steps)]), state.budget, set("budget")),
      choice("x-axis", AXES, state.axis, set("axis")),
      choice("smoothing", WIDTHS, state.width, set("width")),
      choice("interval", BANDS, state.band, set("band")));
    const colour = (line) => COLOURS[chosen.indexOf(line) % COLOURS.length];
    draw(box.firstChild, chosen.map((line) => withMean(line, line.seeds, state, colour(line)).all),
      [], state.axis, Number(state.budget));
    below.replaceChildren(element("p", { class: "note" }, "A line is the mean over seeds. It ends " +
      "with its shortest seed."), element("div", { class: "keys" }, ...chosen.map((line) =>
      toggle(`${nameOf(line)}: ${line.seeds.length} seeds, end at ` +
        format(mean(line.seeds.map((seed) => seed.ends ?? seed.eval))), colour(line), true, () => {
        state.lines = chosen.filter((other) => other !== line).map(nameOf).join("|") || "none";
        write();
      }))));
    list.replaceChildren(...found.map((line) => {
      const input = element("input", { type: "checkbox" });
      input.checked = chosen.includes(line);
      input.addEventListener("change", () => {
        const now = input.checked ? [...chosen, line] : chosen.filter((other) => other !== line);
        state.lines = now.map(nameOf).join("|") || "none";
        write();
      });
      return element("label", {}, input, nameOf(line));
    }));
  }
  show();
  addEventListener("hashchange", () => { state = read(); show(); });
  new ResizeObserver(() => show()).observe(box);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const root of document.querySelectorAll(".chart")) {
    const show = root.classList.contains("explorer") ? showExplorer : showAlgorithm;
    (root.dataset.pair ? showPair : show)(root);
  }
});
