"use strict";
// Draws the Grafana dashboards in ../grafana from a live Prometheus. Served by `steadyctl dashboards preview`, which also
// hands /api/v1 on to Prometheus. In the address: dashboard=job&span=900&run_id=ID;
// still (draw once), step and window (seconds between points and in rates, at least).

const COLORS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#e02f44", "#b877d9", "#37872d", "#8ab8ff", "#c4162a", "#fa6400",
  "#705da0", "#0f9ba8", "#a352cc", "#96d98d", "#ffb357", "#808a95"];
const NAMED = { green: "#56a64b", red: "#e02f44", orange: "#ff780a", blue: "#3274d9", yellow: "#f2cc0c", purple: "#a352cc",
  "semi-dark-green": "#37872d", "light-blue": "#8ab8ff", "light-purple": "#ca95e5", "dark-orange": "#c4501b", text: "#9aa0aa",
  transparent: "transparent" };
const UNITS = {
  percentunit: (v) => `${trim(v * 100, 1)} %`,
  s: seconds,
  bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  Bps: (v) => `${scaled(v, 1000, ["B", "kB", "MB", "GB", "TB"])}/s`,
  hertz: (v) => scaled(v, 1000, ["Hz", "kHz", "MHz", "GHz"]),
  celsius: (v) => `${trim(v, 1)} °C`,
  watt: (v) => scaled(v, 1000, ["W", "kW", "MW"]),
};
const DASHBOARDS = ["job", "node"];
const POWERS_OF_2 = Array.from({ length: 60 }, (_, i) => 2 ** i);
const REFRESH_MS = 10000;
const address = new URLSearchParams(location.search);
const chosen = { values: {} };
let plots = [];
let round = 0;

// -- numbers ---------------------------------------------------------------------------------------------------------
function trim(value, digits) {
  return Number(value.toFixed(digits)).toString();
}
function scaled(value, base, names) {
  let i = 0;
  while (Math.abs(value) >= base && i < names.length - 1) { value /= base; i += 1; }
  return `${trim(value, Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0)} ${names[i]}`;
}
function seconds(v) {
  const a = Math.abs(v);
  if (a === 0) return "0 s";
  if (a < 0.001) return `${trim(v * 1e6, 0)} µs`;
  if (a < 1) return `${trim(v * 1e3, a < 0.01 ? 2 : 0)} ms`;
  if (a < 120) return `${trim(v, a < 10 ? 2 : 1)} s`;
  if (a < 7200) return `${trim(v / 60, 1)} min`;
  return a < 172800 ? `${trim(v / 3600, 1)} h` : `${trim(v / 86400, 1)} days`;
}
function shown(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  return UNITS[unit] ? UNITS[unit](value) : trim(value, Math.abs(value) < 10 ? 3 : Math.abs(value) < 1000 ? 1 : 0);
}

// -- asking ----------------------------------------------------------------------------------------------------------
function span() {
  return Number(document.getElementById("span").value);
}
function step() {
  return Math.max(Math.ceil(span() / 240), Number(address.get("step") || 1));
}
function filled(expr) {
  const window = Math.max(4 * step(), Number(address.get("window") || 60));
  const values = { __rate_interval: `${window}s`, __range: `${span()}s`, __interval: `${step()}s`, ...chosen.values };
  return expr.replace(/\$\{?(\w+)\}?/g, (_, name) => values[name] ?? ".*");
}
async function ask(path, parameters) {
  const answer = await fetch(`api/v1/${path}?${new URLSearchParams(parameters)}`);
  const told = await answer.json();
  if (told.status !== "success") throw new Error(told.error || "no answer");
  return told.data;
}
async function now(expr) {
  return (await ask("query", { query: filled(expr) })).result;
}
async function overTime(expr) {
  const end = Math.floor(Date.now() / 1000 / step()) * step();
  const told = await ask("query_range", { query: filled(expr), start: end - span(), end, step: step() });
  return told.result.map((r) => ({ labels: r.metric, points: new Map(r.values.map(([t, v]) => [t, Number(v)])) }));
}
function named(format, labels) {
  if (format) return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "").trim();
  return Object.entries(labels).filter(([k]) => k !== "__name__").map(([k, v]) => `${k}=${v}`).join(" ") || "value";
}

// -- drawing ---------------------------------------------------------------------------------------------------------
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function wordsOf(panel) {
  const words = {};
  for (const m of panel.fieldConfig?.defaults?.mappings ?? []) if (m.type === "value") Object.assign(words, m.options);
  return words;
}
function colorsOf(panel, found) {
  const fixed = {};
  for (const o of panel.fieldConfig.overrides ?? []) {
    const color = o.properties.find((p) => p.id === "color")?.value?.fixedColor;
    if (o.matcher.id === "byName" && color) fixed[o.matcher.options] = NAMED[color] ?? color;
  }
  return found.map((s, i) => fixed[s.name] ?? COLORS[i % COLORS.length]);
}
function nothing(body) {
  body.append(element("div", "number none", "no data"));
}

async function number(panel, body) {
  const result = await now(panel.targets[0].expr);
  if (!result.length) return nothing(body);
  const value = Number(result[0].value[1]);
  const defaults = panel.fieldConfig.defaults;
  let color = "green";
  for (const s of defaults.thresholds?.steps ?? []) if (s.value === null || value >= s.value) color = s.color;
  const made = element("div", "number", wordsOf(panel)[String(value)]?.text ?? shown(value, defaults.unit));
  made.style.color = NAMED[color] ?? color;
  body.append(made);
}

async function series(panel) {
  const each = await Promise.all(panel.targets.map(async (t) =>
    (await overTime(t.expr)).map((s) => ({ ...s, name: named(t.legendFormat, s.labels) }))));
  return each.flat();
}

async function lines(panel, body, marks) {
  const found = await series(panel);
  if (!found.length) return nothing(body);
  const defaults = panel.fieldConfig.defaults;
  const stacked = defaults.custom?.stacking?.mode === "normal";
  const end = Math.floor(Date.now() / 1000 / step()) * step();
  const times = [];
  for (let t = end - span(); t <= end; t += step()) times.push(t);
  let values = found.map((s) => times.map((t) => (Number.isFinite(s.points.get(t)) ? s.points.get(t) : null)));
  if (stacked) {
    const sums = times.map(() => 0);
    values = values.map((row) => row.map((v, i) => (v === null ? null : (sums[i] += v))));
  }
  const colors = colorsOf(panel, found);
  const legend = element("div", "legend");
  found.forEach((s, i) => {
    const entry = element("span", "", s.name);
    const line = element("i");
    line.style.background = colors[i];
    entry.prepend(line);
    legend.append(entry);
  });
  const holder = element("div");
  body.append(holder, legend);
  const axis = { stroke: ink("--faint"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--grid") }, font: "11px system-ui" };
  const low = defaults.min ?? null;
  const high = defaults.max ?? null;
  const plot = new uPlot({
    width: body.clientWidth, height: Math.max(body.clientHeight - legend.offsetHeight, 60),
    cursor: { sync: { key: "all" }, points: { size: 5 } },
    scales: {
      x: { min: end - span(), max: end },
      y: { range: (_, a, b) => [low ?? a, high ?? (a === null || b === (low ?? a) ? (low ?? a ?? 0) + 1 : b + (b - (low ?? a)) * 0.05)] },
    },
    series: [{}, ...found.map((s, i) => ({
      label: s.name, stroke: colors[i], width: 1.3, points: { show: times.length < 3, size: 4 },
      value: (_, v) => shown(v, defaults.unit),
      fill: stacked && i === 0 ? `${colors[i]}99` : undefined,
    }))],
    bands: stacked ? found.slice(1).map((_, i) => ({ series: [i + 2, i + 1], fill: `${colors[i + 1]}99` })) : [],
    axes: [{ ...axis, space: 90 }, { ...axis, size: 70, incrs: defaults.unit === "bytes" ? POWERS_OF_2 : undefined, values: (_, ticks) => ticks.map((v) => shown(v, defaults.unit)) }],
    hooks: { draw: [(u) => drawMarks(u, marks)] },
  }, [times, ...values], holder);
  plots.push(plot);
  hover(plot, holder, found, values, stacked, defaults.unit);
}

function hover(plot, holder, found, values, stacked, unit) {
  // What the cursor stands on, as the panel's tool tip: a browser's own is enough here.
  plot.over.addEventListener("mousemove", () => {
    const i = plot.cursor.idx;
    if (i === null || i === undefined) return;
    const rows = found.map((s, k) => {
      const below = stacked && k ? values[k - 1][i] ?? 0 : 0;
      return [s.name, values[k][i] === null ? null : values[k][i] - below];
    }).filter(([, v]) => v !== null).sort((a, b) => b[1] - a[1]).slice(0, 20);
    plot.over.title = [new Date(plot.data[0][i] * 1000).toLocaleString(), ...rows.map(([n, v]) => `${shown(v, unit)}  ${n}`)].join("\n");
  });
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const mark of marks) {
    ctx.strokeStyle = NAMED[mark.color] ?? mark.color;
    ctx.lineWidth = 1;
    ctx.setLineDash([4, 3]);
    for (const t of mark.times) {
      const x = plot.valToPos(t, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

async function rowsOverTime(panel, body, kind) {
  const found = await series(panel);
  if (!found.length) return nothing(body);
  const canvas = element("canvas");
  body.append(canvas);
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [body.clientWidth, body.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const rows = kind === "heatmap" ? buckets(found) : found;
  const words = wordsOf(panel);
  ctx.font = "11px system-ui";
  const text = (row) => (kind === "heatmap" ? shown(Number(row.labels.le), panel.fieldConfig.defaults.unit) : row.name);
  const left = Math.min(Math.max(...rows.map((r) => ctx.measureText(text(r)).width)) + 8, width / 3);
  const end = Math.floor(Date.now() / 1000 / step()) * step();
  const room = height - 16;
  const rowHeight = room / rows.length;
  const most = Math.max(1e-9, ...rows.flatMap((r) => [...r.points.values()].filter(Number.isFinite)));
  const x = (t) => left + ((t - (end - span())) / span()) * (width - left);
  const wide = Math.max(((width - left) / span()) * step() + 0.5, 1);
  rows.forEach((row, i) => {
    for (const [t, v] of row.points) {
      if (!Number.isFinite(v)) continue;
      const share = Math.sqrt(Math.max(v, 0) / most);
      const known = words[String(v)];
      ctx.fillStyle = kind === "heatmap" ? `rgba(255, 120, 10, ${share})` : known ? NAMED[known.color] ?? known.color : v ? NAMED.orange : ink("--grid");
      const gap = rowHeight > 4 ? 1 : 0;
      ctx.fillRect(x(t), i * rowHeight + gap, wide, rowHeight - 2 * gap);
    }
    if (rowHeight >= 9 || i % Math.ceil(11 / rowHeight) === 0) {
      ctx.fillStyle = ink("--ink");
      ctx.fillText(text(row), 2, i * rowHeight + rowHeight / 2 + 4, left - 6);
    }
  });
  ctx.fillStyle = ink("--faint");
  const clock = (t) => new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  ctx.fillText(clock(end - span()), left, height - 3);
  ctx.textAlign = "right";
  ctx.fillText(clock(end), width, height - 3);
}

function buckets(found) {
  // From counts up to each bound to counts between bounds; the highest bound on top; bounds without a count left out.
  const ordered = [...found].sort((a, b) => Number(a.labels.le.replace("+Inf", "Infinity")) - Number(b.labels.le.replace("+Inf", "Infinity")));
  const made = ordered.map((row, i) => ({
    ...row, labels: { ...row.labels, le: row.labels.le.replace("+Inf", "Infinity") },
    points: new Map([...row.points].map(([t, v]) => [t, Math.max(v - (i ? ordered[i - 1].points.get(t) ?? 0 : 0), 0)])),
  }));
  const used = made.map((row) => [...row.points.values()].some((v) => v > 0));
  const [first, last] = [used.indexOf(true), used.lastIndexOf(true)];
  return (first < 0 ? made : made.slice(Math.max(first - 1, 0), last + 2)).reverse();
}

async function rowsNow(panel, body) {
  const each = await Promise.all(panel.targets.map((t) => now(t.expr)));
  if (!each.some((r) => r.length)) return nothing(body);
  const organize = panel.transformations?.find((t) => t.id === "organize")?.options ?? {};
  const hidden = organize.excludeByName ?? {};
  const rows = new Map();
  each.forEach((result, i) => {
    for (const r of result) {
      const labels = Object.entries(r.metric).filter(([k]) => !hidden[k]).sort();
      const key = JSON.stringify(labels);
      if (!rows.has(key)) rows.set(key, { labels: Object.fromEntries(labels), values: [] });
      rows.get(key).values[i] = Number(r.value[1]);
    }
  });
  const columns = [...new Set([...rows.values()].flatMap((r) => Object.keys(r.labels)))];
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const c of columns) head.append(element("th", "", c));
  panel.targets.forEach((t) => head.append(element("th", "", organize.renameByName?.[`Value #${t.refId}`] ?? t.refId)));
  const content = table.createTBody();
  for (const row of [...rows.values()].sort((a, b) => JSON.stringify(a.labels).localeCompare(JSON.stringify(b.labels), undefined, { numeric: true }))) {
    const line = content.insertRow();
    for (const c of columns) line.insertCell().textContent = row.labels[c] ?? "";
    panel.targets.forEach((_, i) => (line.insertCell().textContent = shown(row.values[i], panel.fieldConfig.defaults.unit)));
  }
  body.append(table);
}

const DRAW = {
  stat: number,
  timeseries: lines,
  heatmap: (p, b) => rowsOverTime(p, b, "heatmap"),
  "state-timeline": (p, b) => rowsOverTime(p, b, "state-timeline"),
  table: rowsNow,
};

// -- the page --------------------------------------------------------------------------------------------------------
async function labelValues(query) {
  const [, metric, label] = /^label_values\((.*),\s*(\w+)\)$/s.exec(query);
  const end = Date.now() / 1000;
  const found = await ask("series", { "match[]": filled(metric), start: end - span(), end });
  return [...new Set(found.map((s) => s[label] ?? ""))].sort();
}

async function variables(dashboard) {
  const place = document.getElementById("variables");
  for (const v of dashboard.templating.list) {
    if (v.type !== "query") continue;
    const values = await labelValues(v.query.query);
    if (v.sort === 2) values.reverse();
    let select = place.querySelector(`select[name="${v.name}"]`);
    if (!select) {
      const label = element("label", "", `${v.label || v.name} `);
      select = element("select");
      select.name = v.name;
      select.addEventListener("change", () => { address.set(v.name, select.value); draw(); });
      label.append(select);
      place.append(label);
    }
    const before = select.options.length ? select.value : address.get(v.name);
    select.replaceChildren();
    if (v.includeAll) select.append(new Option("all", v.allValue || ".*"));
    for (const value of values) select.append(new Option(value || "(none)", value.replace(/[.*+?^${}()|[\]\\]/g, "\\\\$&")));
    const kept = [...select.options].find((o) => o.value === before || o.text === before);
    if (kept) kept.selected = true;
    chosen.values[v.name] = select.value ?? "";
  }
}

async function marksOf(dashboard) {
  return Promise.all((dashboard.annotations?.list ?? []).map(async (mark) => {
    const found = await overTime(mark.expr).catch(() => []);
    const all = found.flatMap((s) => [...s.points.keys()]).sort((a, b) => a - b);
    return { color: mark.iconColor, times: all.filter((t, i) => !i || t - all[i - 1] > step() * 1.5) };
  }));
}

function frame(panel) {
  const made = element("section", `panel ${panel.type}`);
  made.title = panel.description || "";
  made.append(element("h3", "", panel.title), element("div", "body"));
  made.style.gridColumn = `span ${panel.gridPos.w}`;
  made.style.height = `${panel.gridPos.h * 32}px`;
  return made;
}

async function fill(panel, place, marks) {
  const body = place.querySelector(".body");
  const fresh = body.cloneNode(false);
  body.replaceWith(fresh);
  try {
    await (DRAW[panel.type] ?? (() => fresh.append(element("div", "none", `no drawing for ${panel.type}`))))(panel, fresh, marks);
  } catch (problem) {
    fresh.append(element("div", "error", problem.message));
  }
}

let shownPanels = null;
async function draw() {
  const mine = (round += 1);
  const state = document.getElementById("state");
  try {
    const dashboard = await (await fetch(`grafana/${address.get("dashboard") || "job"}.json`)).json();
    await variables(dashboard);
    const marks = await marksOf(dashboard);
    if (mine !== round) return;
    for (const p of plots) p.destroy();
    plots = [];
    if (!shownPanels) {
      const main = document.getElementById("panels");
      shownPanels = dashboard.panels.map((p) => {
        const place = p.type === "row" ? element("h2", "", p.title) : frame(p);
        main.append(place);
        return [p, place];
      });
    }
    await Promise.all(shownPanels.filter(([p]) => p.type !== "row").map(([p, place]) => fill(p, place, marks)));
    document.title = `${dashboard.title} — steadyrun`;
    state.className = "";
    state.textContent = `as of ${new Date().toLocaleTimeString()}`;
    document.body.dataset.drawn = String(mine);
  } catch (problem) {
    state.className = "bad";
    state.textContent = problem.message;
  }
}

function start() {
  const current = address.get("dashboard") || "job";
  for (const name of DASHBOARDS) {
    const link = element("a", "", name === "job" ? "Job" : "Node and GPU");
    link.href = `?dashboard=${name}`;
    if (name === current) link.setAttribute("aria-current", "page");
    document.getElementById("dashboards").append(link);
  }
  const select = document.getElementById("span");
  const wanted = address.get("span") || "900";
  if (![...select.options].some((o) => o.value === wanted)) select.append(new Option(`${wanted} s`, wanted));
  select.value = wanted;
  select.addEventListener("change", draw);
  draw();
  if (address.get("still") === null) setInterval(draw, REFRESH_MS);
}
start();
