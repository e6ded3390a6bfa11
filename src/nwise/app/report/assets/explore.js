// The schedule explorer: every choice looks up a schedule that nwise has timed; this script computes no schedules.
"use strict";
const { dimensions, initial, entries, baselines, local } = data;
const names = Object.keys(dimensions);
const chosen = Object.fromEntries(names.map(name => [name, initial[name] ?? 0]));
const key = choice => names.map(name => choice[name]).join(",");
const at = change => entries[key({ ...chosen, ...change })];
const isBaseline = method => baselines.includes(dimensions.method[method]);
const methods = () => dimensions.method.map((_, i) => i).filter(i => at({ method: i }));

// A method's number of micro-batches with the shortest step.
function atBestM(method) {
  const options = dimensions.microbatches
    .map((m, i) => ({ m, entry: at({ method, microbatches: i }) })).filter(one => one.entry);
  return options.reduce((a, b) => (b.entry.period < a.entry.period * (1 - 1e-9) ? b : a));
}

function draw() {
  const entry = at({});
  const message = document.getElementById("answer");
  document.getElementById("absent").hidden = Boolean(entry);
  document.getElementById("result").hidden = !entry;
  message.textContent = verdict().text;
  table();
  if (!entry) { document.getElementById("absent").textContent = absence(); return; }
  document.getElementById("period").textContent = show(entry.period);
  document.getElementById("bound").textContent = entry.optimal
    ? `${show(entry.lower_bound)}: no order is faster` : `${show(entry.lower_bound)} (this is ${((entry.period / entry.lower_bound - 1) * 100).toFixed(1)} % above it)`;
  document.getElementById("held").textContent = `${entry.in_flight.join(", ")} micro-batches on ${entry.rows[0]} to ${entry.rows.at(-1)}`;
  document.getElementById("busy").textContent = `${entry.utilisation.map(share => Math.round(100 * share)).join(", ")} %`;
  document.getElementById("order").textContent = entry.order;
  gantt("grid", entry, "time, in the unit of the costs");
}

function absence() {
  const A = dimensions.stages[chosen.stages];
  return `With ${A} stages ${dimensions.method[chosen.method]} is end-to-end training: N is not smaller than A.`;
}

function cell(row, text, kind = "td") {
  const made = document.createElement(kind);
  if (kind === "th") made.scope = "row";
  made.textContent = text;
  row.append(made);
}

function table() {
  const body = document.querySelector("#methods tbody");
  const rows = methods().map(method => ({ method, entry: at({ method }), best: atBestM(method) }));
  const { shortest } = verdict();
  rows.sort((a, b) => a.entry.period - b.entry.period);
  body.replaceChildren(...rows.map(({ method, entry, best }) => {
    const row = document.createElement("tr");
    if (method === chosen.method) row.classList.add("chosen");
    if (shortest === method) row.classList.add("best");
    cell(row, dimensions.method[method] + (isBaseline(method) ? " (end-to-end)" : ""), "th");
    cell(row, show(entry.period));
    cell(row, show(entry.lower_bound));
    cell(row, Math.max(...entry.in_flight));
    cell(row, `${Math.round(100 * entry.utilisation.reduce((a, b) => a + b) / entry.utilisation.length)} %`);
    cell(row, show(best.entry.period));
    cell(row, best.m);
    return row;
  }));
}

// Like the planner: end-to-end needs the fewest steps, so it is named unless its step is longer.
// Local training, whose step is nearly always the shortest, is not compared by time.
function verdict() {
  const all = methods().filter(method => !local.includes(dimensions.method[method])).map(method => ({ method, ...atBestM(method) }));
  const first = list => list.reduce((a, b) => (b && (!a || b.entry.period < a.entry.period * (1 - 1e-9)) ? b : a), null);
  const pipeline = first(all.filter(one => isBaseline(one.method)));
  const strategy = first(all.filter(one => !isBaseline(one.method)));
  const named = one => `${dimensions.method[one.method]} with M = ${one.m} (${show(one.entry.period)})`;
  if (!pipeline || !strategy) {
    const only = pipeline || strategy;
    return { shortest: only && only.method, text: only ? `The shortest step: ${named(only)}.` : "" };
  }
  const ratio = pipeline.entry.period / strategy.entry.period;
  if (!Number.isFinite(ratio)) return { shortest: null, text: "" };
  if (ratio <= 1.005) return { shortest: pipeline.method, text: `The shortest step: ${named(pipeline)}. No strategy between local and ` +
    `end-to-end has a shorter one; that of ${named(strategy)} is ${Math.round(100 / ratio - 100)} % longer.` };
  return { shortest: strategy.method, text: `The shortest step: ${named(strategy)}. It is worth it if it reaches your quality in fewer ` +
    `than ${ratio.toFixed(2)} times the steps of end-to-end, whose shortest is that of ${named(pipeline)}.` };
}

function menus() {
  const place = document.getElementById("choices");
  const titles = { method: "strategy or pipeline", stages: "stages, A", microbatches: "micro-batches, M", costs: "costs", latency: "time of a message" };
  for (const name of names) {
    if (dimensions[name].length < 2) continue; // nothing to choose
    const set = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = titles[name];
    set.append(legend);
    dimensions[name].forEach((value, i) => {
      const label = document.createElement("label");
      label.className = "choice";
      const input = document.createElement("input");
      Object.assign(input, { type: "radio", name, value: i, checked: i === chosen[name] });
      input.addEventListener("change", () => { chosen[name] = i; draw(); });
      label.append(input, String(value));
      set.append(label);
    });
    place.append(set);
  }
}

menus();
draw();
document.body.dataset.ready = "yes";
