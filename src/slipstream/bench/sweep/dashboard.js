"use strict";
// Rows that differ in nothing but `repeat` become one cell: a mean with a 95 % interval of Student's t. Only the view that is
// chosen is drawn, from the cells that the filters leave.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

const SETUP = ["run", "label", "model", "scheme", "parallel"];
const LOAD = ["input_len", "output_len", "batch_size"];
const DIMENSIONS = [...SETUP, ...LOAD];
const TITLES = {run: "run", label: "engine", model: "model", scheme: "scheme", parallel: "parallel form", input_len: "input tokens",
  output_len: "output tokens", batch_size: "batch size"};
const ms = (name, field) => ["p50", "p99"].map((q) => [`${field}_${q}`, {title: `${name} ${q}, ms`, scale: 1e3, low: true}]);
const METRICS = Object.fromEntries([
  ["output_throughput", {title: "output throughput, tok/s"}],
  ["total_throughput", {title: "total throughput, tok/s"}],
  ["steady_throughput", {title: "steady throughput, tok/s"}],
  ["requests_per_s", {title: "requests/s"}],
  ["goodput", {title: "goodput, requests/s"}],
  ...ms("TPOT", "tpot_s"), ...ms("TTFT", "ttft_s"), ...ms("E2E", "e2e_s"), ...ms("ITL", "itl_s"),
  ["power_w", {title: "power, W", low: true}],
  ["j_per_output_token", {title: "energy, J/output token", low: true}],
  ["peak_memory_bytes", {title: "peak memory, GiB", scale: 2 ** -30, low: true}],
  ["start_s", {title: "start, s", low: true}],
]);
const OTHERS = ["flops_per_byte", "achieved_flops_per_s", "step_bytes", "step_flops"];

// --- From columns to cells ---------------------------------------------------------------------------------------------

const rows = data.runs.flatMap((run) => Array.from({length: run.num_rows}, (_, i) => {
  const row = {run: run.name};
  for (const [name, values] of Object.entries(run.columns)) row[name] = values[i];
  return row;
}));

// Two-sided 95 % quantiles of Student's t, by degrees of freedom; between them linear in 1/df.
const T95 = [[1, 12.706], [2, 4.303], [3, 3.182], [4, 2.776], [5, 2.571], [6, 2.447], [8, 2.306], [10, 2.228], [15, 2.131],
  [20, 2.086], [30, 2.042], [60, 2.0], [Infinity, 1.96]];
function t95(df) {
  for (let i = 1; i < T95.length; i++) {
    const [d0, t0] = T95[i - 1], [d1, t1] = T95[i];
    if (df <= d1) return df <= d0 ? t0 : t0 + (t1 - t0) * (1 / d0 - 1 / df) / (1 / d0 - 1 / d1);
  }
  return 1.96;
}

function stats(values) {
  const n = values.length, mean = d3.mean(values), sd = n > 1 ? d3.deviation(values) : null;
  const half = sd === null ? null : t95(n - 1) * sd / Math.sqrt(n);
  return {n, mean, sd, half};
}

// A cell has for each metric its mean `x`, half its interval `x±`, and its values `x#`, computed when they are asked for first.
class Cell {
  constructor(group) {
    this.group = group;
    this.n = group.length;
    for (const name of DIMENSIONS) this[name] = group[0][name];
    this.setup = setupName(this);
    this.load = `${this.input_len}/${this.output_len}`;
  }

  compute(name) {
    const scale = METRICS[name]?.scale ?? 1;
    const values = this.group.map((row) => row[name]).filter((value) => value !== null && value !== undefined).map((value) => value * scale);
    const found = values.length ? stats(values) : {};
    for (const [key, value] of [[name, found.mean], [`${name}±`, found.half], [`${name}#`, values]]) Object.defineProperty(this, key, {value});
  }
}
for (const name of [...Object.keys(METRICS), ...OTHERS]) {
  for (const key of [name, `${name}±`, `${name}#`])
    Object.defineProperty(Cell.prototype, key, {get() { this.compute(name); return this[key]; }});
}

function cellsOf(these) {
  const groups = d3.group(these.filter((row) => row.error === null || row.error === undefined),
    (row) => DIMENSIONS.map((name) => row[name]).join("\u0000"));
  return Array.from(groups.values(), (group) => new Cell(group));
}

const valuesOf = Object.fromEntries(DIMENSIONS.map((name) => [name, [...new Set(rows.map((row) => row[name]))]
  .sort((a, b) => SETUP.includes(name) ? 0 : a - b)]));
const varying = DIMENSIONS.filter((name) => valuesOf[name].length > 1);
const setupParts = SETUP.filter((name) => varying.includes(name));
function setupName(cell) {
  return (setupParts.length ? setupParts : ["label"]).map((name) => cell[name]).join(" · ");
}
const allCells = cellsOf(rows);
const present = Object.keys(METRICS).filter((name) => data.runs.some((run) => name in run.columns));

// --- What the reader chose ---------------------------------------------------------------------------------------------

const hidden = Object.fromEntries(DIMENSIONS.map((name) => [name, new Set()]));
const chosen = {view: "tradeoff"};
const chosenCells = () => allCells.filter((cell) => DIMENSIONS.every((name) => !hidden[name].has(cell[name])));

const number = (value) => value === undefined || value === null || Number.isNaN(value) ? "–"
  : Math.abs(value) >= 1000 ? d3.format(",.0f")(value) : d3.format(",.3~g")(value);
const withInterval = (cell, name) => cell[name] === undefined ? "–"
  : number(cell[name]) + (cell[`${name}±`] ? ` ± ${number(cell[`${name}±`])}` : "");
const title = (name) => METRICS[name]?.title ?? TITLES[name] ?? name;
const describe = (cell, ...names) => [cell.setup, `${cell.input_len} in, ${cell.output_len} out, batch ${cell.batch_size}`
  + (cell.n > 1 ? ` (${cell.n} runs)` : ""), ...names.map((name) => `${title(name)}: ${withInterval(cell, name)}`)].join("\n");

function select(key, label, options, names = title) {
  if (!options.includes(chosen[key])) chosen[key] = options[0];
  const box = make("select", {onchange: () => { chosen[key] = box.value; draw(); }},
    ...options.map((value) => make("option", {value, textContent: names(value), selected: value === chosen[key]})));
  $("controls").append(make("label", {}, label, box));
  return chosen[key];
}
const metric = (key, label, wanted = () => true, first) => {
  const options = present.filter(wanted);
  if (chosen[key] === undefined && options.includes(first)) chosen[key] = first;
  return select(key, label, options);
};
const low = (name) => METRICS[name].low === true, high = (name) => !low(name);
const colourBy = () => select("colour", "colour", [...setupParts.filter((name) => valuesOf[name].length <= 20),
  ...(setupParts.length > 1 || !setupParts.length ? ["setup"] : [])], (name) => name === "setup" ? "all of these" : title(name));

// A value that happens to be a colour's name, such as none, is a value all the same.
const hue = (value) => ({value, scale: "color"});
const width = () => Math.max(320, $("chart").clientWidth);
const narrow = () => width() < 600;
function plot(options) {
  return Plot.plot({width: width(), height: narrow() ? 380 : 520, marginLeft: 64, marginTop: 32, marginBottom: 44, marginRight: 24,
    style: {fontSize: narrow() ? "11px" : "12px"}, ...options});
}
const say = (text) => { $("note").textContent = text; };
function colourScale(by) {
  const domain = by === "setup" ? [...new Set(allCells.map((cell) => cell.setup))] : valuesOf[by] ?? [];
  return {legend: domain.length <= 20, domain, scheme: domain.length <= 10 ? "Observable10" : "Tableau10", type: "categorical"};
}
// A logarithmic axis whose numbers do not touch: all of 1, 2, 5 over up to two decades, else powers of ten.
function logAxis(values) {
  const [least, most] = d3.extent(values);
  const decades = Math.log10(most / least), room = least === most ? 2 : 1.15;
  return {type: "log", domain: [least / room, most * room], tickFormat: number,
    ticks: decades > 4 ? 5 : decades > 1.5 ? (narrow() ? 4 : 8) : narrow() ? 4 : 6};
}

// Of a value's interval, as far as a logarithmic axis shows it.
const ends = (cell, name) => [Math.max(cell[name] - (cell[`${name}±`] ?? 0), cell[name] / 10), cell[name] + (cell[`${name}±`] ?? 0)];

// --- Views -------------------------------------------------------------------------------------------------------------

const VIEWS = {
  tradeoff: ["Throughput & latency", (cells) => {
    const x = metric("x", "latency", low, "tpot_s_p50"), y = metric("y", "throughput", high), by = colourBy();
    cells = cells.filter((cell) => cell[x] > 0 && cell[y] > 0);
    if (!cells.length) return nothing();
    say("A line joins the batch sizes of one setup and length. Bars are 95 % intervals over repetitions. Upper left is better.");
    const ordered = d3.sort(cells, (cell) => cell.batch_size), sure = cells.filter((cell) => cell[`${x}±`] || cell[`${y}±`]);
    const few = sure.length <= 600;
    return plot({
      x: {label: title(x), ...logAxis(cells.flatMap((cell) => few ? ends(cell, x) : cell[x]))},
      y: {label: title(y), ...logAxis(cells.flatMap((cell) => few ? ends(cell, y) : cell[y]))}, grid: true, color: colourScale(by),
      marks: [
        Plot.line(ordered, {x, y, z: (cell) => `${cell.run}|${cell.setup}|${cell.load}`, stroke: hue(by), strokeWidth: 1, strokeOpacity: .45}),
        few ? Plot.ruleX(sure, {x, y1: (c) => ends(c, y)[0], y2: (c) => ends(c, y)[1], stroke: hue(by)}) : null,
        few ? Plot.ruleY(sure, {y, x1: (c) => ends(c, x)[0], x2: (c) => ends(c, x)[1], stroke: hue(by)}) : null,
        Plot.dot(cells, {x, y, fill: hue(by), r: cells.length > 1000 ? 2 : 3.5}),
        Plot.tip(cells, Plot.pointer({x, y, title: (cell) => describe(cell, x, y)})),
      ],
    });
  }],

  heat: ["Heat map", (cells) => {
    const name = metric("heat", "value", () => true, "output_throughput");
    cells = cells.filter((cell) => cell[name] !== undefined);
    if (!cells.length) return nothing();
    const setups = d3.groups(cells, (cell) => cell.setup), most = narrow() ? 6 : 24;
    say(`Batch size across, input/output tokens down; ${low(name) ? "less" : "more"} is better.`
      + (setups.length > most ? ` The first ${most} of ${setups.length} setups; filters choose others.` : ""));
    const domain = d3.extent(cells, (cell) => cell[name]);
    const log = domain[0] > 0 && domain[1] / domain[0] > 20;
    const middle = log ? Math.sqrt(domain[0] * domain[1]) : (domain[0] + domain[1]) / 2;
    const batches = [...new Set(cells.map((cell) => cell.batch_size))].sort(d3.ascending);
    const loads = [...new Set(d3.sort(cells, (cell) => cell.input_len, (cell) => cell.output_len).map((cell) => cell.load))];
    const scale = {type: log ? "log" : "linear", domain, scheme: "YlGnBu"};
    const round = domain[1] / domain[0] > 100 ? /^1e/ : /^[125]e/, box = make("div", {className: "grid"});
    const wide = Math.min(width(), setups.length === 1 ? 720 : 400);
    for (const [setup, these] of setups.slice(0, most)) {
      box.append(make("div", {}, make("h3", {textContent: setup}), Plot.plot({
        width: wide, height: 46 + loads.length * Math.max(18, Math.min(34, 420 / loads.length)), marginLeft: 74, marginTop: 4, marginBottom: 34,
        padding: .04, style: {fontSize: "11px"},
        x: {domain: batches, label: "batch size", type: "band"}, y: {domain: loads, label: null, type: "band"}, color: scale,
        marks: [
          Plot.cell(these, {x: "batch_size", y: "load", fill: name, title: (cell) => describe(cell, name)}),
          batches.length <= 9 ? Plot.text(these, {x: "batch_size", y: "load", text: (cell) => number(cell[name]),
            fill: (cell) => cell[name] > middle ? "#fff" : "#111", fontSize: batches.length > 6 ? 9 : 11, pointerEvents: "none"}) : null,
        ],
      })));
    }
    return make("div", {}, Plot.legend({color: {...scale, label: title(name), tickFormat: (value) => !log || round.test(value.toExponential()) ? number(value) : ""}, ticks: 4, width: Math.min(width(), 360)}), box);
  }],

  roofline: ["Roofline", (cells) => {
    const by = colourBy();
    cells = cells.filter((cell) => cell.flops_per_byte > 0);
    if (!cells.length) return nothing("There is no decode step to place: every answer had one token, or a model's description was not at hand.");
    const roofs = data.runs.filter((run) => run.meta.ceilings).flatMap((run) => {
      const {read, ...peaks} = run.meta.ceilings;
      const [from, to] = [d3.min(cells, (c) => c.flops_per_byte) / 3, d3.max(cells, (c) => c.flops_per_byte) * 3];
      return Object.entries(peaks).map(([kind, peak]) => ({kind, read, peak, run: run.name,
        points: [[from, Math.min(peak, read * from)], ...(peak / read > from && peak / read < to ? [[peak / read, peak]] : []), [to, Math.min(peak, read * to)]]}));
    });
    say("Decode steps. Bytes and operations of a step are estimated from the model's description, times are measured. "
      + (roofs.length ? "Lines are this machine's measured ceilings: memory (slanted) and products by type (level)." : "No ceilings were measured."));
    const lines = roofs.flatMap((roof) => roof.points.map(([x, y]) => ({x, y, key: `${roof.run} ${roof.kind}`})));
    const tips = roofs.filter((roof, i) => roofs.findIndex((other) => other.kind === roof.kind) === i)
      .map((roof) => ({x: roof.points.at(-1)[0], y: roof.points.at(-1)[1], kind: roof.kind, peak: roof.peak}));
    const level = [];  // lines that almost touch have one label
    for (const tip of d3.sort(tips, (tip) => tip.y)) {
      if (level.length && tip.y < level.at(-1).y * 1.12) level.at(-1).kind += `, ${tip.kind}`;
      else level.push({...tip});
    }
    return plot({
      x: {label: "operations per byte", ...logAxis([...cells.map((c) => c.flops_per_byte), ...lines.map((p) => p.x)])},
      y: {label: "operations/s", ...logAxis([...cells.map((c) => c.achieved_flops_per_s), ...lines.map((p) => p.y)]), tickFormat: (v) => d3.format(".2~s")(v)},
      grid: true, color: colourScale(by),
      marks: [
        Plot.line(lines, {x: "x", y: "y", z: "key", stroke: "currentColor", strokeWidth: 1.5}),
        Plot.text(level, {x: "x", y: "y", text: "kind", textAnchor: "end", dy: -7}),
        Plot.dot(cells, {x: "flops_per_byte", y: "achieved_flops_per_s", fill: hue(by), r: cells.length > 1000 ? 2 : 3.5}),
        Plot.tip(cells, Plot.pointer({x: "flops_per_byte", y: "achieved_flops_per_s", title: (c) =>
          `${describe(c, "tpot_s_p50")}\n${number(c.flops_per_byte)} op/byte, ${d3.format(".3s")(c.achieved_flops_per_s)}op/s`})),
      ],
    });
  }],

  pareto: ["Pareto front", (cells) => {
    const x = metric("x", "less of", low, "tpot_s_p50"), y = metric("y", "more of", high), by = colourBy();
    const loads = [...new Set(d3.sort(cells, (c) => c.input_len, (c) => c.output_len).map((c) => c.load))];
    if (!loads.length) return nothing();
    const load = select("load", "input/output", loads, (value) => value);
    cells = cells.filter((cell) => cell.load === load && cell[x] > 0 && cell[y] > 0);
    if (!cells.length) return nothing();
    let best = -Infinity;
    const front = d3.sort(cells, (cell) => cell[x], (cell) => -cell[y]).filter((cell) => cell[y] > best && ((best = cell[y]), true));
    say(`${front.length} of ${cells.length} points are on the front: no other has both less ${title(x)} and more ${title(y)}.`);
    return make("div", {}, plot({
      x: {label: title(x), ...logAxis(cells.map((c) => c[x]))}, y: {label: title(y), ...logAxis(cells.map((c) => c[y]))}, grid: true,
      color: colourScale(by),
      marks: [
        Plot.line(front, {x, y, curve: "step-after", stroke: "currentColor", strokeOpacity: .5}),
        Plot.dot(cells, {x, y, fill: hue(by), fillOpacity: .3, r: 3}), Plot.dot(front, {x, y, fill: hue(by), stroke: "currentColor", r: 5}),
        Plot.tip(cells, Plot.pointer({x, y, title: (cell) => describe(cell, x, y)})),
      ],
    }), table(front, [["setup", (c) => c.setup], ["batch", (c) => c.batch_size], [title(x), (c) => withInterval(c, x)], [title(y), (c) => withInterval(c, y)]]));
  }],

  power: ["Power", (cells) => {
    cells = cells.filter((cell) => cell.power_w !== undefined);
    if (!cells.length) return nothing("No power was read: this machine has no counter that this user may read (RAPL, NVML).");
    const by = colourBy();
    say("Energy of the whole packages and GPUs, idle share included, over the time of the batch.");
    const both = (name) => plot({
      height: 300, x: {type: "log", label: "batch size", ticks: [...new Set(cells.map((c) => c.batch_size))], tickFormat: String}, y: {label: title(name), zero: true, nice: true, tickFormat: number},
      grid: true, color: {...colourScale(by), legend: name === "power_w" && colourScale(by).legend},
      marks: [
        Plot.line(d3.sort(cells, (c) => c.batch_size), {x: "batch_size", y: name, z: (c) => `${c.run}|${c.setup}|${c.load}`, stroke: hue(by), strokeOpacity: .5}),
        Plot.dot(cells, {x: "batch_size", y: name, fill: hue(by), r: 3.5}),
        Plot.tip(cells, Plot.pointer({x: "batch_size", y: name, title: (c) => describe(c, "power_w", "j_per_output_token")})),
      ],
    });
    return make("div", {}, both("power_w"), both("j_per_output_token"));
  }],

  compare: ["Compare", (cells) => {
    const measured = (name) => valuesOf[name].filter((value) => cells.some((cell) => cell[name] === value && cell.output_throughput > 0));
    const options = d3.sort(SETUP.filter((name) => varying.includes(name)), (name) => measured(name).length < 2);  // what failed whole comes last
    if (!options.length) return nothing("There is one setup only: nothing to compare. `--baseline` adds another sweep's results.");
    const by = select("compareBy", "compare", options);
    const values = measured(by).length > 1 ? measured(by) : valuesOf[by];
    const a = select(`a-${by}`, "A", values, String);
    const b = select(`b-${by}`, "B", values.filter((value) => value !== a), String);
    const name = metric("ratio", "value", () => true, "output_throughput");
    const rest = DIMENSIONS.filter((dimension) => dimension !== by);
    const keyed = (value) => new Map(cells.filter((cell) => cell[by] === value && cell[name] > 0)
      .map((cell) => [rest.map((dimension) => cell[dimension]).join("\u0000"), cell]));
    const first = keyed(a), found = [];
    for (const [key, second] of keyed(b)) if (first.has(key)) found.push(ratioOf(first.get(key), second, name, rest));
    if (!found.length) return nothing("A and B have no case in common among what the filters leave.");
    const mean = Math.exp(d3.mean(found, (f) => Math.log(f.ratio)));
    const better = (f) => low(name) ? f.high < 1 : f.low > 1, worse = (f) => low(name) ? f.low > 1 : f.high < 1;
    for (const f of found) f.verdict = f.low === null ? "one run" : better(f) ? "B better" : worse(f) ? "B worse" : "can't tell";
    const sums = d3.rollups(found, (v) => v.length, (f) => f.verdict).map(([verdict, n]) => `${n} ${verdict}`).join(", ");
    const most = narrow() ? 25 : 60, shown = d3.sort(found, (f) => -Math.abs(Math.log(f.ratio))).slice(0, most).sort((f, g) => d3.ascending(f.ratio, g.ratio));
    say(`${title(name)}, B over A: geometric mean ${mean.toFixed(3)} over ${found.length} cases: ${sums}. Bars are 95 % intervals (Welch's t on logarithms).`
      + (found.length > most ? ` The ${most} that differ most are drawn.` : ""));
    const left = narrow() ? 130 : Math.min(420, 7 * d3.max(shown, (f) => f.name.length) + 20);
    const short = (text) => { const fit = Math.floor(left / 6.6); return text.length > fit ? `${text.slice(0, fit - 1)}…` : text; };
    return make("div", {}, plot({
      height: 60 + shown.length * 20, marginLeft: left,
      x: {label: "B / A", grid: true, axis: "both", nice: true, tickFormat: number}, y: {domain: shown.map((f) => f.name), label: null, tickFormat: short},
      color: {domain: ["B better", "can't tell", "B worse", "one run"], range: ["#2a8a4a", "#8a8f98", "#c0392b", "#5b8dd6"], legend: true},
      marks: [
        Plot.ruleX([1], {strokeDasharray: "3 3"}),
        Plot.ruleY(shown.filter((f) => f.low !== null), {y: "name", x1: "low", x2: "high", stroke: hue("verdict"), strokeWidth: 2}),
        Plot.dot(shown, {x: "ratio", y: "name", fill: hue("verdict"), r: 4, title: (f) => `${f.name}\n${f.text}`, tip: true}),
      ],
    }), table(d3.sort(found, (f) => -f.ratio).slice(0, 200), [["case", (f) => f.name], ["A", (f) => withInterval(f.a, name)],
      ["B", (f) => withInterval(f.b, name)], ["B / A", (f) => f.text], ["", (f) => f.verdict]]));
  }],

  rows: ["Rows", (cells) => {
    const columns = present.filter((name) => !["itl_s_p50", "itl_s_p99", "requests_per_s"].includes(name));
    const key = chosen.sort ?? "setup", sign = chosen.down ? -1 : 1, most = 300;
    const value = (cell) => key === "load" ? cell.input_len * 1e7 + cell.output_len : cell[key];
    const sorted = [...cells].sort((a, b) => sign * d3.ascending(value(a), value(b)));
    const head = (name, text) => make("button", {type: "button", textContent: text + (key === name ? (chosen.down ? " ↓" : " ↑") : ""),
      onclick: () => { chosen.down = chosen.sort === name && !chosen.down; chosen.sort = name; draw(); }});
    say(`${cells.length} measured cases` + (cells.length > most ? `, of which the first ${most} are shown` : "") + ". Click a column to sort.");
    return table(sorted.slice(0, most), [[head("setup", "setup"), (c) => c.setup], [head("load", "in/out"), (c) => c.load], [head("batch_size", "batch"), (c) => c.batch_size],
      ...columns.map((name) => [head(name, title(name)), (c) => withInterval(c, name)])]);
  }],

  errors: ["Errors", () => {
    const failed = rows.filter((row) => row.error && DIMENSIONS.every((name) => !hidden[name].has(row[name])));
    say(failed.length ? `${failed.length} of ${rows.length} measurements failed.` : "No measurement failed.");
    const groups = d3.groups(failed, (row) => setupName(row), (row) => row.error).flatMap(([setup, errors]) => errors.map(([error, these]) => ({setup, error, these})));
    const node = table(groups, [["setup", (g) => g.setup], ["rows", (g) => g.these.length], ["error", (g) => g.error]]);
    for (const row of node.querySelectorAll("tr")) row.lastChild.className = "text";
    return failed.length ? node : make("div");
  }],
};

function ratioOf(a, b, name, rest) {
  const [of_a, of_b] = [a, b].map((cell) => stats(cell[`${name}#`].map(Math.log)));
  const difference = of_b.mean - of_a.mean, ratio = Math.exp(difference);
  const label = rest.filter((dimension) => varying.includes(dimension) && SETUP.includes(dimension)).map((dimension) => a[dimension]);
  const found = {a, b, ratio, low: null, high: null, name: [`${a.load} × ${a.batch_size}`, ...label].join(" · "), text: ratio.toFixed(3)};
  if (of_a.sd === null || of_b.sd === null) return found;
  const [va, vb] = [of_a.sd ** 2 / of_a.n, of_b.sd ** 2 / of_b.n];
  const df = va + vb > 0 ? (va + vb) ** 2 / (va ** 2 / (of_a.n - 1) + vb ** 2 / (of_b.n - 1)) : Infinity;
  const half = t95(df) * Math.sqrt(va + vb);
  Object.assign(found, {low: Math.exp(difference - half), high: Math.exp(difference + half)});
  found.text = `${found.ratio.toFixed(3)} (${found.low.toFixed(3)} to ${found.high.toFixed(3)})`;
  return found;
}

function table(items, columns) {
  const cell = (tag, content) => make(tag, {}, content instanceof Node ? content : String(content));
  return make("div", {className: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name]) => cell("th", name)))),
    make("tbody", {}, ...items.map((item) => make("tr", {}, ...columns.map(([, of]) => cell("td", of(item))))))));
}

function nothing(why = "Nothing was measured that the filters leave.") {
  say(why);
  return make("div");
}

// --- The page ----------------------------------------------------------------------------------------------------------

function draw() {
  $("controls").replaceChildren();
  for (const button of $("views").children) {
    button.setAttribute("aria-selected", button.dataset.view === chosen.view);
    const views = $("views"), left = button.offsetLeft - views.offsetLeft;
    if (button.dataset.view === chosen.view && (left < views.scrollLeft || left + button.offsetWidth > views.scrollLeft + views.clientWidth)) views.scrollLeft = left;
  }
  say("");
  $("chart").replaceChildren(VIEWS[chosen.view][1](chosenCells()));
}

function drawFilters() {
  for (const name of varying) {
    const box = make("fieldset", {}, make("legend", {textContent: TITLES[name]}));
    for (const value of valuesOf[name]) {
      const button = make("button", {type: "button", textContent: value, title: "click: hide or show; double-click: this one alone",
        onclick: () => { hidden[name].delete(value) || hidden[name].add(value); update(); },
        ondblclick: () => { hidden[name] = new Set(valuesOf[name].filter((other) => other !== value)); update(); }});
      button.dataset.value = value;
      box.append(button);
    }
    const update = () => {
      for (const button of box.querySelectorAll("button")) {
        const value = valuesOf[name].find((other) => String(other) === button.dataset.value);
        button.setAttribute("aria-pressed", !hidden[name].has(value));
      }
      draw();
    };
    for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", "true");
    $("filters").append(box);
  }
}

function drawAbout() {
  for (const run of data.runs) {
    const {time, versions, cpu, num_cores, gpus} = run.meta;
    const machine = [...(gpus ?? []), cpu && `${cpu} (${num_cores} cores)`].filter(Boolean).join(", ");
    const what = [`${run.name}: ${run.num_rows} measurements`, time?.slice(0, 16).replace("T", " "), machine, versions && `Slipstream ${versions.slipstream}`];
    $("about").append(make("div", {textContent: what.filter(Boolean).join(" · ")}));
  }
  for (const [name, text] of Object.entries(data.definitions)) $("definitions").append(make("dt", {textContent: name}), make("dd", {textContent: text}));
}

for (const [view, [name]] of Object.entries(VIEWS)) {
  const button = make("button", {type: "button", role: "tab", textContent: name, onclick: () => { chosen.view = view; draw(); }});
  button.dataset.view = view;
  $("views").append(button);
}
$("controls").onsubmit = (event) => event.preventDefault();
drawAbout();
drawFilters();
draw();
let last = width();
addEventListener("resize", () => { if (width() !== last) { last = width(); draw(); } });
document.documentElement.dataset.ready = String(Math.round(performance.now()));
