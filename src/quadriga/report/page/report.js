"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const $ = (id) => document.getElementById(id);

// All texts of data become text nodes. Characters that a reader would not see are written as codes.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const visible = (text) => String(text).replace(HIDDEN,
  (c) => (c < "\u0100" ? "\\x" : "\\u") + c.charCodeAt(0).toString(16).padStart(c < "\u0100" ? 2 : 4, "0"));

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value; else node.setAttribute(name, value);
  }
  node.append(...children.map((c) => (c instanceof Node ? c : visible(c))));
  return node;
}
const number = (y) => {
  if (y === null || y === undefined) return "–";
  const size = Math.abs(y);
  if (size >= 1e5) return y.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  if (size >= 1000) return y.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 1e-3) return y.toExponential(2);
  return String(Number(y.toPrecision(4)));
};
const tick = (y) => (y !== 0 && Math.abs(y) < 1e-3 ? String(Number(y.toPrecision(2)).toExponential()) : number(y));
const seconds = (s) => {
  if (s === undefined || s === null) return "–";
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return s < 6000 ? `${(s / 60).toFixed(1)} min` : `${(s / 3600).toFixed(1)} h`;
};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColor = (i) => `--c${i % 8}`;
const dot = (name) => { const d = el("span", { className: "dot", "aria-hidden": "true" }); d.style.background = `var(${name})`; return d; };
const last = (values) => (values || []).reduce((found, y) => (y === null ? found : y), null);
const option = (value, text) => el("option", { value }, text);
const unique = (values) => [...new Set(values)];

// The step that all parts of the page show.
const steps = unique(runs.flatMap((run) => [...run.steps, ...run.samples.map((s) => s.step)]))
  .filter((step) => step !== null).sort((a, b) => a - b);
const shown = { step: steps.length ? steps[steps.length - 1] : 0, smoothing: 0.6, axis: "step" };
const nearest = (values, wanted) => values.reduce((best, v) => (Math.abs(v - wanted) <= Math.abs(best - wanted) ? v : best), values[0]);
const indexAt = (run) => run.steps.indexOf(nearest(run.steps, shown.step));

function table(node, heads, rows, numeric = false) {
  const kind = (i) => (numeric && rows.length && /^[-–\d]/.test(rows[0].cells[i]) ? "number" : "");
  node.replaceChildren(
    el("thead", {}, el("tr", {}, ...heads.map((h, i) => el("th", { scope: "col", className: kind(i) }, h)))),
    el("tbody", {}, ...rows.map(({ cells, className = "", cell = "" }) => el("tr", { className },
      ...cells.map((c, i) => (i ? el("td", { className: cell || kind(i) }, c) : el("th", { scope: "row" }, c)))))));
}
const runHeads = () => runs.map((run, i) => el("span", {}, dot(runColor(i)), run.name));

// Runs
function showRuns() {
  $("made").textContent = visible(`${runs.map((run) => run.path).join(", ")} · made ${data.made} by Quadriga ${data.version}`);
  const value = (run, ...names) => { const n = names.find((name) => run.metrics[name]); return n ? number(last(run.metrics[n])) : "–"; };
  const score = (run) => (last(run.metrics["val/accuracy"]) === null || !run.metrics["val/accuracy"]
    ? value(run, "val/score") : `${(100 * last(run.metrics["val/accuracy"])).toFixed(1)} %`);
  table($("runs"), ["run", "command", "steps", "reward", "loss", "validation", "val loss", "tokens/s", "time", "restarts", "warnings"],
    runs.map((run, i) => ({ cells: [
      el("span", {}, dot(runColor(i)), run.name), run.kind, number(last(run.steps)),
      value(run, "reward/mean"), value(run, "sft/loss", "rm/loss", "actor/loss"), score(run), value(run, "val/loss"),
      value(run, "perf/tokens_per_second"), seconds(last(run.metrics["progress/elapsed"])),
      run.metrics["restarts/count"] ? number(last(run.metrics["restarts/count"])) : "0", String(run.warnings.length)] })), true);
  $("problems").append(...runs.flatMap((run) => run.problems.map((p) => el("li", {}, `${run.name}: ${p}`))));
  const differ = runs.length > 1;
  document.querySelectorAll(".of-run").forEach((node) => { node.hidden = !differ; node.style.display = differ ? "" : "none"; });
  for (const id of ["timeline-run", "samples-run"]) $(id).append(...runs.map((run, i) => option(i, run.name)));
}

// Curves
const FIRST = ["reward/mean", "val/accuracy", "val/score", "sft/loss", "rm/loss", "rm/accuracy", "val/loss", "response_length/mean",
  "actor/entropy", "actor/kl_loss", "actor/loss", "critic/loss", "actor/grad_norm", "mismatch/k3", "staleness/mean", "perf/tokens_per_second", "time/step"];
const charts = new Map();  // name → { plot, values, redraw }
const has = (name) => runs.some((run) => run.metrics[name]);

function smoothed(values) {
  const weight = values.filter((y) => y !== null).length < 25 ? 0 : shown.smoothing;
  let sum = 0, whole = 0;
  // The mean with weights w^0, w^1, w^2, … of a value and those before it.
  return values.map((y) => {
    if (y === null) return null;
    sum = weight * sum + (1 - weight) * y;
    whole = weight * whole + (1 - weight);
    return sum / whole;
  });
}
function columns(name) {
  const tables = runs.map((run) => {
    const ys = run.metrics[name] || run.steps.map(() => null);
    const xs = shown.axis === "step" ? run.steps : run.metrics["progress/elapsed"] || run.steps;
    const kept = xs.map((x, i) => i).filter((i) => xs[i] !== null && ys[i] !== null).sort((a, b) => xs[a] - xs[b]);
    const found = kept.map((i) => ys[i]);
    return [kept.map((i) => xs[i]), found, smoothed(found)];
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}
function markStep(plot) {
  const run = runs.find((r) => r.steps.length);
  const x = shown.axis === "step" || !run ? shown.step : (run.metrics["progress/elapsed"] || run.steps)[indexAt(run)];
  const left = plot.valToPos(x, "x", true), { top, height } = plot.bbox;
  if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) return;
  plot.ctx.save();
  plot.ctx.strokeStyle = color("--soft");
  plot.ctx.setLineDash([4, 4]);
  plot.ctx.beginPath(); plot.ctx.moveTo(left, top); plot.ctx.lineTo(left, top + height); plot.ctx.stroke();
  plot.ctx.restore();
}
function tellValues(chart, index = null) {
  const { name } = chart;
  const found = runs.flatMap((run, i) => {
    if (!run.metrics[name]) return [];
    if (index !== null && chart.plot) return [[i, chart.plot.data[2 * i + 1][index], chart.plot.data[0][index]]];
    const known = run.steps.map((s, k) => k).filter((k) => run.metrics[name][k] !== null);
    const k = nearest(known, indexAt(run));
    return [[i, run.metrics[name][k], run.steps[k]]];
  });
  const same = unique(found.map(([, , at]) => at)).length === 1;
  chart.values.replaceChildren(...found.map(([i, value, at], order) => el("span", {},
    ...(runs.length > 1 ? [dot(runColor(i))] : []), `${number(value)} `,
    el("small", {}, same && order + 1 < found.length ? "" : index !== null && shown.axis === "time" ? `at ${seconds(at)}` : `at step ${at}`))));
}
function draw(chart) {
  if (chart.plot) chart.plot.destroy();
  const values = columns(chart.name), box = chart.node.querySelector(".plot");
  const series = runs.flatMap((run, i) => {
    const line = color(runColor(i)), few = values[2 * i + 1].filter((y) => y !== null && y !== undefined).length < 25;
    const raw = { stroke: line, width: few || !shown.smoothing ? 1.75 : 1, alpha: few || !shown.smoothing ? 1 : 0.3, spanGaps: true, points: { show: few, size: 5, fill: line } };
    return [raw, { stroke: line, width: 1.75, show: !few && shown.smoothing > 0, spanGaps: true, points: { show: false } }];
  });
  const axis = { stroke: color("--soft"), font: "11px system-ui", grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  chart.plot = new uPlot({
    width: box.clientWidth || 320, height: 190, legend: { show: false }, padding: [8, 10, 0, 0],
    cursor: { sync: { key: "step" }, y: false, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: (u, low, high) => (low === high ? [low - (low ? Math.abs(low) / 2 : 0), low + (Math.abs(low) / 2 || 1)] : uPlot.rangeNum(low, high, 0.1, true)) } }, series: [{}, ...series],
    axes: [{ ...axis, size: 26, values: (u, ticks) => ticks.map(tick) }, { ...axis, size: 56, values: (u, ticks) => ticks.map(tick) }],
    hooks: { draw: [markStep], setCursor: [(u) => tellValues(chart, u.cursor.idx)] },
  }, values, box);
  chart.plot.over.addEventListener("click", () => {
    const { idx } = chart.plot.cursor;
    if (idx !== null && idx !== undefined && shown.axis === "step") setStep(chart.plot.data[0][idx]);
  });
  tellValues(chart);
}
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.get(entry.target.dataset.name);
    if (entry.isIntersecting && chart && !chart.plot) draw(chart);
  }
}, { rootMargin: "300px" });
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.get(entry.target.dataset.name);
    if (chart && chart.plot) chart.plot.setSize({ width: entry.target.querySelector(".plot").clientWidth, height: 190 });
  }
});
function chartOf(name) {
  const [unit, meaning] = data.about[name] || ["", ""];
  const values = el("p", { className: "values" });
  const node = el("div", { className: "chart" }, el("h3", {}, name),
    el("p", {}, meaning ? `${meaning}${unit && unit !== "1" ? ` [${unit}]` : ""}` : "\u00a0"), values,
    el("div", { className: "plot", role: "img", "aria-label": `Curve of ${visible(name)}` }));
  node.dataset.name = name;
  charts.set(name, { name, node, values, plot: null });
  seen.observe(node); sizes.observe(node);
  return node;
}
function showCurves() {
  const wanted = $("find").value.trim().toLowerCase();
  seen.disconnect(); sizes.disconnect();
  charts.forEach((chart) => chart.plot && chart.plot.destroy());
  charts.clear();
  const names = unique(runs.flatMap((run) => Object.keys(run.metrics))).filter((n) => n !== "progress/elapsed");
  if (wanted) {
    const found = names.filter((n) => `${n} ${(data.about[n] || []).join(" ")}`.toLowerCase().includes(wanted));
    $("charts").replaceChildren(found.length ? el("div", { className: "charts" }, ...found.map(chartOf)) : el("p", { className: "empty" }, "No metric has this in its name or meaning."));
    return;
  }
  const first = FIRST.filter((n) => has(n) && !(n === "val/score" && has("val/accuracy") && runs.every((run) => last(run.metrics["val/score"]) === last(run.metrics["val/accuracy"]))));
  const groups = new Map();
  for (const name of names.filter((n) => !first.includes(n))) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  const more = [...groups].map(([group, own]) => {
    const details = el("details", {}, el("summary", {}, `${group} `, el("small", {}, `${own.length} ${own.length > 1 ? "metrics" : "metric"}`)));
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector(".charts")) details.append(el("div", { className: "charts" }, ...own.map(chartOf)));
    });
    return details;
  });
  $("charts").replaceChildren(first.length ? el("div", { className: "charts" }, ...first.map(chartOf)) : el("p", { className: "empty" }, "There are no metrics."), ...more);
}

// Timeline
const ORDER = ["rollout", "replica", "reward", "actor", "ref", "critic", "pause", "controller"];
const PHASE = { rollout: 0, generate: 0, validate: 6, evaluate: 3, update_actor: 1, step: 1, update_critic: 4, score: 2, sync_weights: 5, sync: 5, save: 7 };
const phaseColor = (name) => `--c${name in PHASE ? PHASE[name] : 7}`;
let drawn = [];
function timelineWindow(run) {
  const ends = run.metrics["progress/elapsed"] || [], count = Number($("window").value), at = indexAt(run);
  const all = [Math.min(...run.spans.map((s) => s[2])), Math.max(...run.spans.map((s) => s[3]))];
  if (!count || at < 0 || !ends.length) return all;
  const from = Math.max(0, Math.min(at - Math.floor(count / 2), ends.length - count)), to = Math.min(ends.length - 1, from + count - 1);
  return [from ? ends[from - 1] : all[0], ends[to]];
}
function showTimeline() {
  const run = runs[Number($("timeline-run").value) || 0], canvas = $("spans");
  drawn = [];
  canvas.hidden = !run.spans.length;
  canvas.style.display = canvas.hidden ? "none" : "";
  $("span-at").replaceChildren(run.spans.length ? "" : "No times of phases were recorded.");
  if (!run.spans.length) { $("phases").replaceChildren(); $("phases").parentNode.hidden = true; return; }
  const rank = (t) => ORDER.findIndex((o) => t.startsWith(o)) + 1 || 99;
  const tracks = unique(run.spans.map((s) => s[0])).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const [from, to] = timelineWindow(run), ratio = window.devicePixelRatio || 1, line = 26, width = canvas.clientWidth, left = 92;
  const height = tracks.length * line + 26, scale = (width - left - 8) / (to - from || 1);
  canvas.style.height = `${height}px`; canvas.width = width * ratio; canvas.height = height * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui"; ctx.textBaseline = "middle";
  tracks.forEach((track, i) => {
    ctx.fillStyle = color("--soft"); ctx.fillText(visible(track).slice(0, 14), 8, i * line + line / 2 + 3);
    ctx.fillStyle = color("--line"); ctx.fillRect(left, (i + 1) * line + 2, width - left - 8, 1);
  });
  for (const [track, name, start, end] of run.spans) {
    if (end < from || start > to) continue;
    const x = left + Math.max(0, start - from) * scale, w = Math.max(1, (Math.min(end, to) - Math.max(start, from)) * scale);
    const box = { x, y: tracks.indexOf(track) * line + 7, w, h: line - 9, text: `${track}: ${name} ${seconds(end - start)}, from ${seconds(start)}` };
    ctx.fillStyle = color(phaseColor(name)); ctx.fillRect(box.x, box.y, box.w - (box.w > 3 ? 1 : 0), box.h);
    drawn.push(box);
  }
  ctx.fillStyle = color("--soft");
  const ends = run.metrics["progress/elapsed"] || [], shownSteps = run.steps.map((s, i) => [s, ends[i]]).filter(([, e]) => e > from && e <= to);
  const every = Math.ceil(shownSteps.length / Math.max(1, (width - left) / 80));
  shownSteps.forEach(([step, end], i) => {
    const x = left + (end - from) * scale;
    ctx.fillRect(x, 0, 1, height - 20);
    if (i % every === 0) { const text = `step ${step}`; ctx.fillText(text, Math.min(x, width - 4) - ctx.measureText(text).width - 2, height - 10); }
  });
  const sums = (test) => { const found = {}; for (const [track, name, start, end] of run.spans) if (test(start, end)) { const key = `${name}\u0000${track}`; found[key] = (found[key] || 0) + end - start; } return found; };
  const at = indexAt(run), begin = at > 0 ? ends[at - 1] : -Infinity, whole = sums(() => true), here = sums((s, e) => (s + e) / 2 > begin && (s + e) / 2 <= ends[at]);
  const total = Math.max(...run.spans.map((s) => s[3])) - Math.min(...run.spans.map((s) => s[2]));
  canvas.setAttribute("aria-label", visible(`Timeline of ${run.name}, ${tracks.join(", ")}; the table below has the seconds of each phase`));
  $("phases").parentNode.hidden = false;
  table($("phases"), ["phase", "role", `step ${run.steps[at]}`, "whole run", "share of time"], Object.keys(whole).sort((a, b) => whole[b] - whole[a]).map((key) => {
    const [name, track] = key.split("\u0000");
    return { cells: [el("span", {}, dot(phaseColor(name)), name), track, seconds(here[key]), seconds(whole[key]), `${(100 * whole[key] / total).toFixed(1)} %`] };
  }), true);
}
$("spans").addEventListener("mousemove", (event) => {
  const hit = drawn.find((b) => event.offsetX >= b.x && event.offsetX <= b.x + b.w && event.offsetY >= b.y && event.offsetY <= b.y + b.h);
  $("span-at").textContent = hit ? visible(hit.text) : "";
});

// Samples
const messages = (text) => visible(text).trim();
function shadedTokens(sample, kind, largest) {
  const parts = sample.tokens.map(([text, logProb, difference]) => {
    const value = kind === 1 ? logProb : difference;
    const node = el("span", { title: `log-probability ${number(logProb)}, trainer − rollout ${number(difference)}` }, text);
    if (value !== null) node.style.background = `rgba(var(${kind === 2 && value < 0 ? "--shade-low" : "--shade"}), ${(0.5 * Math.min(1, Math.abs(value) / largest)).toFixed(3)})`;
    return node;
  });
  const left = (sample.response_tokens || 0) - sample.tokens.length;
  return left > 0 ? [...parts, el("span", { className: "empty" }, ` … ${left} more tokens`)] : parts;
}
// An episode: its time line, and a block for each turn and each observation.
function timeLine(turns) {
  const parts = turns.flatMap((t, i) => (t.seconds || []).map((s, k) => [s, k, `${k ? "answer to turn" : "turn"} ${i + 1}`]));
  const sum = (kind) => parts.reduce((all, [s, k]) => (k === kind ? all + s : all), 0), whole = sum(0) + sum(1);
  if (!whole) return [];
  const bar = el("div", { className: "episode-time", "aria-hidden": "true" }, ...parts.map(([s, k, name]) => {
    const part = el("span", { className: k ? "observed" : "sampled", title: `${name}: ${seconds(s)}` });
    part.style.flexGrow = s / whole;
    return part;
  }));
  return [bar, el("p", { className: "legend" }, el("span", {}, dot("--c0"), `turns ${seconds(sum(0))}`), el("span", {}, dot("--c2"), `environment ${seconds(sum(1))}`))];
}
function turnBlocks(sample, kind, largest) {
  let from = 0;
  return sample.turns.flatMap((turn, i) => [0, 1].map((observed) => {
    const count = turn.tokens[observed], tokens = (kind && sample.tokens ? sample.tokens : []).slice(from, from + count);
    const raw = observed ? turn.observed : turn.sampled;
    const text = tokens.length && !observed ? shadedTokens({ tokens, response_tokens: count }, kind, largest) : [raw === "" ? el("span", { className: "empty" }, "(empty)") : visible(raw)];
    const tools = (turn.source.match(/tool [^,;]+/g) || []).map((name) => name.slice(5)).join(", ");
    const head = observed ? `observed${turn.source ? ` from ${turn.source}` : ""}` : `turn ${i + 1}${tools ? ` calls ${tools}` : ""}`;
    const facts = [`${count} ${count === 1 ? "token" : "tokens"}`, ...(observed ? [] : [`reward ${number(turn.reward)}`]), ...(turn.seconds ? [seconds(turn.seconds[observed])] : [])];
    from += count;
    return observed && !count ? null : el("div", { className: `turn ${observed ? "observed" : "sampled"}` }, el("p", {}, el("b", {}, head), ` ${facts.join(" · ")}`), el("div", {}, ...text));
  })).filter(Boolean);
}
function card(sample, kind, largest) {
  const facts = [["reward", number(sample.reward)]];
  if (sample.advantage !== null && sample.advantage !== undefined) facts.push(["advantage", el("span", { className: sample.advantage >= 0 ? "up" : "down" }, (sample.advantage > 0 ? "+" : "") + number(sample.advantage))]);
  for (const [name, value] of Object.entries(sample.components || {})) facts.push([name, number(value)]);
  if (sample.response_tokens !== null && sample.response_tokens !== undefined) facts.push(["tokens", number(sample.response_tokens)]);
  if (sample.weight_versions) facts.push(["weights of step", sample.weight_versions.map(([version, count]) => (sample.weight_versions.length > 1 ? `${version} (${count})` : version)).join(", ")]);
  const shaded = kind && sample.tokens && sample.tokens.length;
  const text = sample.turns && sample.turns.length ? turnBlocks(sample, kind, largest) : shaded ? shadedTokens(sample, kind, largest) : [messages(sample.response) || el("span", { className: "empty" }, "(an empty response)")];
  return el("article", { className: "card" }, el("dl", { className: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    ...timeLine(sample.turns || []), el("div", { className: "response", tabIndex: 0, role: "group", "aria-label": "Response" }, ...text));
}
const groupOf = (sample) => sample.group || sample.prompt;
function showSamples() {
  const run = runs[Number($("samples-run").value) || 0], split = $("split").value;
  const splits = unique(run.samples.map((s) => s.split)).sort();  // training first
  if (!splits.includes(split) || $("split").options.length !== splits.length) {
    $("split").replaceChildren(...splits.map((s) => option(s, s === "val" ? "validation" : "training")));
    if (splits.includes(split)) $("split").value = split;
  }
  const own = run.samples.filter((s) => s.split === $("split").value);
  if (!own.length) {
    $("samples-step").textContent = "This run has written no responses (trainer.samples_per_step).";
    $("responses").replaceChildren(); $("group").replaceChildren();
    return;
  }
  const known = unique(own.map((s) => s.step)), step = nearest(known, shown.step), here = own.filter((s) => s.step === step);
  const groups = unique(here.map(groupOf)), chosen = Math.min(Math.max(0, $("group").selectedIndex), groups.length - 1);
  $("group").replaceChildren(...groups.map((g, i) => { const text = messages(here.find((s) => groupOf(s) === g).prompt).replace(/\s+/g, " "); return option(i, `${i + 1} of ${groups.length}: ${text.length > 70 ? `… ${text.slice(-70)}` : text}`); }));
  $("group").selectedIndex = chosen;
  const group = here.filter((s) => groupOf(s) === groups[chosen]), kind = Number($("shade").value);
  const values = group.flatMap((s) => (s.tokens || []).map((t) => Math.abs(t[kind] || 0)));
  const largest = kind === 1 ? 3 : values.reduce((most, v) => Math.max(most, v), 1e-12);
  const held = unique(run.samples.map((s) => s.step)).length;
  const few = run.steps_of_samples > held ? `; the page holds ${held} of the ${run.steps_of_samples} steps in samples.jsonl` : "";
  const about = !kind ? "" : values.length ? kind === 2 ? ` The darkest shade is ${number(largest)} nats; orange: the trainer gives more, blue: less.` : " The darkest shade is −3 nats, a probability of 5 %, or less." : " These responses have no values by token.";
  const near = step === shown.step ? "" : `, the nearest to step ${shown.step} with responses`;
  $("samples-step").textContent = `Step ${step}${near}${few}.${about}`;
  const sample = group[0], truth = sample.ground_truth === null || sample.ground_truth === undefined ? [] : [["expected", typeof sample.ground_truth === "string" ? sample.ground_truth : JSON.stringify(sample.ground_truth)]];
  const source = sample.data_source ? [["data source", sample.data_source]] : [];
  $("responses").replaceChildren(
    el("div", { className: "prompt", tabIndex: 0, role: "group", "aria-label": "Prompt" }, messages(sample.prompt)),
    el("dl", { className: "facts" }, ...[...truth, ...source, ["responses shown", String(group.length)]].map(([n, v]) => el("div", {}, el("dt", {}, n), el("dd", {}, v)))),
    el("div", { className: "side" }, ...group.map((s) => card(s, kind, largest))));
}

// Settings and environment
function compared(node, heads, rows) {
  table(node, ["name", ...heads], rows.map(([key, values]) => {
    const differs = unique(values).length > 1;
    return { cells: [differs ? `${key} ≠` : key, ...values.map((v) => (v === undefined ? "–" : v))], className: differs ? "differs" : "", cell: "value" };
  }));
}
function showSettings() {
  const which = $("which").value, wanted = $("find-setting").value.trim().toLowerCase();
  const keys = unique(runs.flatMap((run) => Object.keys(run.settings))).filter((key) => {
    // Settings that one command has and another has not differ only where they were set.
    const relevant = runs.every((run) => key in run.settings) || runs.some((run) => run.changed.includes(key));
    const differs = relevant && unique(runs.map((run) => run.settings[key])).length > 1;
    const kept = which === "all" || (which === "differ" ? differs : runs.some((run) => run.changed.includes(key)));
    return kept && key.toLowerCase().includes(wanted);
  });
  if (keys.length) compared($("settings-table"), runHeads(), keys.map((key) => [key, runs.map((run) => run.settings[key])]));
  else $("settings-table").replaceChildren(el("caption", {}, "No settings."));
}
function showEnvironment() {
  const found = runs.map((run) => run.environments[run.environments.length - 1] || {});
  const keys = unique(found.flatMap(Object.keys));
  if (keys.length) compared($("environments"), runHeads(), [...keys.map((key) => [key, found.map((e) => e[key])]), ["starts", runs.map((run) => String(run.environments.length))]]);
  else $("environments").replaceChildren(el("caption", {}, "The run has recorded none (events.jsonl)."));
}
function showWarnings() {
  $("warning-lists").replaceChildren(...runs.map((run, i) => el("div", {},
    ...(runs.length > 1 ? [el("h3", {}, dot(runColor(i)), run.name)] : []),
    run.warnings.length ? el("ul", { className: "list" }, ...run.warnings.map(([at, text]) => el("li", {}, `${seconds(at)}: ${text}`))) : el("p", { className: "empty" }, "None."))));
}

function setStep(step) {
  shown.step = step;
  $("step").value = steps.indexOf(step);
  tellStep();
}
let waiting = 0;
function tellStep() {
  $("step-shown").textContent = shown.step;
  $("step").setAttribute("aria-valuetext", `step ${shown.step}`);
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => {
    charts.forEach((chart) => { if (chart.plot) chart.plot.redraw(false, false); tellValues(chart); });
    showTimeline(); showSamples();
  });
}
function redraw() { charts.forEach((chart) => chart.plot && draw(chart)); showTimeline(); }

$("step").max = Math.max(0, steps.length - 1);
$("step").value = $("step").max;
$("step").addEventListener("input", () => setStep(steps[Number($("step").value)]));
$("smoothing").value = shown.smoothing;
const tellSmoothing = () => { shown.smoothing = Number($("smoothing").value); $("smoothing-shown").textContent = shown.smoothing.toFixed(2); };
$("smoothing").addEventListener("input", () => { tellSmoothing(); redraw(); });
$("axis").addEventListener("change", () => { shown.axis = $("axis").value; redraw(); });
$("find").addEventListener("input", showCurves);
for (const id of ["timeline-run", "window"]) $(id).addEventListener("change", showTimeline);
for (const id of ["samples-run", "split", "group", "shade"]) $(id).addEventListener("change", showSamples);
$("which").addEventListener("change", showSettings);
$("find-setting").addEventListener("input", showSettings);
if (runs.length < 2) { $("which").options[0].remove(); }
window.addEventListener("resize", showTimeline);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
tellSmoothing(); showRuns(); showCurves(); showSettings(); showEnvironment(); showWarnings(); tellStep();
})();
