"use strict";
// The page of a report: everything is made from the JSON in #data. What runs wrote is only ever text (textContent).
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const many = runs.length > 1;
  const root = document.getElementById("report");
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [5, 2], [1, 2]];
  const KINDS = { right: "right", wrong: "wrong", truncated: "truncated", filtered: "filtered out", other: "other" };
  const LEVELS = { alarm: "alarm", warning: "warning", note: "note" };

  // ---- small helpers

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) node.append(child);
    }
    return node;
  }

  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential();
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  }

  function seconds(value) {
    if (value < 60) return value.toFixed(value < 10 ? 1 : 0) + " s";
    const minutes = Math.floor(value / 60);
    if (minutes < 60) return minutes + " min " + Math.round(value % 60) + " s";
    return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (index) => css("--series-" + (index % 8));

  function remember(key, value) {
    try {
      if (value === undefined) return sessionStorage.getItem("report:" + key);
      sessionStorage.setItem("report:" + key, value);
    } catch (_) {
      // A file may be opened where storage is off.
    }
    return null;
  }

  function section(id, title, ...children) {
    const node = make("section", { id, "aria-labelledby": id + "-title" }, make("h2", { id: id + "-title" }, title), ...children);
    root.append(node);
    return node;
  }

  function labelled(text, control) {
    return make("label", { class: "control" }, make("span", {}, text), control);
  }

  function select(options, onchange) {
    return make("select", { onchange }, options.map(([value, text]) => make("option", { value }, text)));
  }

  // ---- theme

  function setTheme(name) {
    if (name) document.documentElement.dataset.theme = name;
    remember("theme", name || "");
    drawAll();
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  // ---- header and verdicts

  function header() {
    const theme = make("button", { type: "button", id: "theme", onclick: () => setTheme(isDark() ? "light" : "dark") }, "Light / dark");
    const links = [...(runs.some((run) => run.pairs.length) ? [["pairs", "Before and after"]] : []), ["anomalies", "Anomalies"], ["curves", "Curves"], ["time", "Time"], ["samples", "Samples"], ["config", "Configuration"], ["provenance", "Origin"]];
    const nav = make("nav", { "aria-label": "Parts of the report" }, links.map(([id, text]) => make("a", { href: "#" + id }, text)));
    const written = new Date(data.written * 1000);
    const stamp = make("span", { class: "stamp" }, "written " + written.toISOString().slice(0, 16).replace("T", " ") + " UTC");
    root.append(make("header", { class: "top" }, make("h1", {}, runs.map((run) => run.name).join(" · ")), nav, make("div", { class: "tools" }, stamp, live(), theme)));
    const box = make("div", { id: "verdicts" });
    for (const [index, run] of runs.entries()) box.append(verdict(run, index));
    root.append(box);
  }

  function verdict(run, index) {
    const level = run.verdict.level;
    const sign = { good: "✓", warning: "!", alarm: "✕" }[level];
    const facts = make("dl", { class: "facts" }, run.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const lines = run.comparisons.map((each) => make("p", { class: "track" }, each.reference + ": " + each.verdict));
    return make(
      "article", { class: "verdict " + level },
      many ? make("h2", { class: "run-name" }, swatch(index), run.name, make("small", {}, run.path)) : make("p", { class: "path" }, run.path),
      make("p", { class: "line", role: "status" }, run.verdict.learned),
      make("p", { class: "health" }, make("span", { class: "badge " + level }, sign + " " + run.verdict.health)),
      run.verdict.advice ? make("p", { class: "advice" }, make("b", {}, "Next: "), run.verdict.advice) : null,
      lines, facts,
    );
  }

  // The same held-out problems before and after, the largest rise first.
  function pairs() {
    if (!runs.some((run) => run.pairs.length)) return;
    const node = section("pairs", "Before and after");
    for (const [index, run] of runs.entries()) {
      if (!run.pairs.length) continue;
      const cell = (one, step) => make("td", {}, make("span", { class: "badge " + (one.reward > 0 ? "right" : "wrong") }, "step " + step + " · reward " + number(one.reward) + " · " + one.outcome), make("div", { class: "answer" }, one.text));
      const body = run.pairs.map((each) => make("tr", {}, make("td", { class: "task" }, each.task, each.answer ? make("small", {}, "expected: " + each.answer) : null), each.responses.map((one, at) => cell(one, each.steps[at]))));
      const [first, last] = run.pairs[0].steps;
      if (many) node.append(make("h3", {}, swatch(index), run.name));
      node.append(table(["held-out problem", "after step " + first, "after step " + last], body, ""));
    }
    node.append(make("p", { class: "muted" }, "First response to each of the problems whose reward rose most."));
  }

  function swatch(index) {
    return make("span", { class: "swatch", style: "background:var(--series-" + (index % 8) + ")", "aria-hidden": "true" });
  }

  let lastTouched = 0;

  function live() {
    if (!data.reload_s) return null;
    for (const event of ["pointerdown", "keydown", "wheel"]) addEventListener(event, () => (lastTouched = Date.now()), { passive: true });
    const box = make("input", { type: "checkbox", id: "live" });
    box.checked = remember("live") !== "off";
    box.addEventListener("change", () => remember("live", box.checked ? "on" : "off"));
    setInterval(() => {
      const reading = Date.now() - lastTouched < 20000;
      if (!box.checked || reading || document.hidden) return;
      remember("scroll", String(scrollY));
      location.reload();
    }, data.reload_s * 1000);
    return make("label", { class: "control live" }, box, make("span", {}, "live: reloads every " + data.reload_s + " s"));
  }

  // ---- anomalies

  function anomalies() {
    const rows = runs.flatMap((run, index) => run.anomalies.map((each) => ({ ...each, run: index })));
    const total = runs.reduce((sum, run) => sum + run.num_anomalies, 0);
    const node = section("anomalies", "Anomalies");
    if (!rows.length) {
      node.append(make("p", { class: "empty" }, "None: no alarm was passed, nothing was skipped, restarted or lost."));
      return;
    }
    rows.sort((a, b) => a.first - b.first);
    const head = ["level", many ? "run" : null, "train step", "what", "cause", "what to do"].filter(Boolean);
    const body = rows.map((each) =>
      make("tr", {},
        make("td", {}, make("span", { class: "badge " + each.level }, LEVELS[each.level])),
        many ? make("td", {}, swatch(each.run), runs[each.run].name) : null,
        make("td", { class: "num" }, each.last > each.first ? each.first + "–" + each.last : String(each.first)),
        make("td", { class: "what" }, each.title), make("td", {}, each.cause), make("td", { class: "muted" }, each.advice)));
    node.append(table(head, body, "anomaly-table"));
    if (total > rows.length) node.append(make("p", { class: "muted" }, "The " + rows.length + " most serious of " + total + "."));
  }

  function table(head, body, id) {
    return make("div", { class: "scroll", tabindex: "0" }, make("table", { id }, make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, body)));
  }

  // ---- curves

  const charts = [];
  let smoothing = 0;

  function smooth(values) {
    if (!smoothing) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = smoothing * mean + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return mean / weight; // corrected for its start at 0
    });
  }

  // One series as [x, columns]: the line, and where there is a range its upper and lower end.
  function lines(chart) {
    const found = [];
    for (const [at, run] of runs.entries()) {
      for (const [place, { metric, label }] of chart.series.entries()) {
        const name = many ? run.name + ": " + label : label;
        const shape = { name, metric, run: at, stroke: many ? at : place, dash: many ? DASHES[place % 6] : [] };
        const evaluated = run.curves.evaluated[metric];
        if (evaluated && run.curves.evaluated_x.length) {
          // Between two evaluations a band would suggest data that are not there.
          const bounds = metric === "eval/avg_at_k" && run.curves.evaluated_x.length > 2 ? [run.curves.evaluated["eval/avg_at_k_high"], run.curves.evaluated["eval/avg_at_k_low"]] : [];
          found.push({ ...shape, x: run.curves.evaluated_x, y: evaluated, bounds, points: true });
        }
        const columns = run.curves.values[metric];
        if (columns) found.push({ ...shape, x: run.curves.x, y: smooth(columns[0]), bounds: columns.length > 1 && !smoothing ? [columns[2], columns[1]] : [] });
      }
    }
    const known = new Set();
    for (const run of runs) {
      for (const reference of run.references) {
        for (const { metric } of chart.series) {
          const curve = reference.curves[metric];
          if (!curve || known.has(reference.name + metric)) continue;
          known.add(reference.name + metric);
          found.push({ name: "reference: " + reference.name, metric, x: curve.x, y: curve.y, bounds: [], reference: true, hold: curve.hold });
        }
      }
    }
    return found.filter((each) => each.y.some((value) => value !== null));
  }

  function options(chart, shapes, width) {
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: { ...grid, size: 4 }, font: "11px " + css("--font") };
    const log = chart.log && shapes.every((each) => each.y.every((value) => value === null || value > 0));
    const series = [{ label: "step", value: (_, value) => (value === null ? "–" : number(value)) }];
    const bands = [];
    for (const each of shapes) {
      const stroke = each.reference ? css("--reference") : color(each.stroke);
      series.push({
        label: each.name, stroke, width: each.reference ? 1.5 : 2, dash: each.reference ? [4, 4] : each.dash, spanGaps: true,
        points: { show: Boolean(each.points), size: 6, fill: css("--card"), stroke }, value: (_, value) => number(value),
        paths: each.hold ? uPlot.paths.stepped({ align: 1 }) : undefined,
      });
      if (each.bounds.length) {
        const edge = { class: "band", label: each.name + " range", width: 0, spanGaps: true, points: { show: false } };
        const at = series.length;
        series.push(edge, { ...edge });
        bands.push({ series: [at, at + 1], fill: stroke + "2e" });
      }
    }
    return {
      width, height: chart.wide ? 300 : 210, series, bands,
      legend: { live: true, markers: { width: 0, fill: (_, at) => series[at].stroke } },
      cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => span(low, high) } },
      axes: [{ ...axis, size: 32, values: wholeSteps },
        { ...axis, size: 56, values: (_, splits) => splits.map((value) => (value === null ? "" : number(value))) }],
      hooks: { drawClear: [(plot) => marks(plot, chart)] },
    };
  }

  const wholeSteps = (_, splits) => splits.map((value) => (Number.isInteger(value) ? value.toLocaleString("en") : ""));

  function span(low, high) {
    if (low === null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.07;
    return [low >= 0 && low < 0.35 * high ? 0 : low - room, high + room];
  }

  // Spans of anomalies behind the curves, and the alarms' limits as lines.
  function marks(plot, chart) {
    const { ctx, bbox } = plot;
    const names = new Set(chart.series.map((each) => each.metric));
    ctx.save();
    for (const run of runs) {
      for (const each of run.anomalies.filter((one) => names.has(one.metric))) {
        const left = Math.max(bbox.left, plot.valToPos(each.first - 0.5, "x", true));
        const right = Math.min(bbox.left + bbox.width, plot.valToPos(each.last + 0.5, "x", true));
        ctx.fillStyle = css(each.level === "alarm" ? "--alarm" : each.level === "warning" ? "--warning" : "--muted") + "26";
        if (right > left) ctx.fillRect(left, bbox.top, Math.max(2, right - left), bbox.height);
      }
    }
    ctx.strokeStyle = css("--alarm");
    ctx.setLineDash([3, 5]);
    for (const limit of chart.limits) {
      const y = plot.valToPos(limit, "y", true);
      if (y < bbox.top || y > bbox.top + bbox.height) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  function draw(entry) {
    const { chart, box } = entry;
    if (entry.plot) entry.plot.destroy();
    const shapes = lines(chart);
    entry.shapes = shapes;
    const tables = shapes.flatMap((each) => [[each.x, each.y], ...each.bounds.map((bound) => [each.x, bound])]);
    entry.plot = new uPlot(options(chart, shapes, Math.max(240, box.clientWidth)), uPlot.join(tables), box);
    entry.plot.root.setAttribute("role", "img");
    entry.plot.root.setAttribute("aria-label", summary(chart, shapes));
  }

  function summary(chart, shapes) {
    const parts = shapes.map((each) => {
      const values = each.y.filter((value) => value !== null);
      return each.name + " from " + number(values[0]) + " to " + number(values[values.length - 1]);
    });
    return chart.title + ": " + parts.join("; ");
  }

  function drawAll() {
    for (const entry of charts) draw(entry);
    drawTimes();
  }

  function figure(chart) {
    const box = make("div", { class: "plot" });
    const unit = chart.unit === "1" ? "" : chart.unit;
    const values = make("details", { class: "values" }, make("summary", {}, "values and meaning"));
    const entry = { chart, box, plot: null, shapes: [] };
    values.addEventListener("toggle", () => {
      if (!values.open || values.children.length > 1) return;
      values.append(make("ul", {}, chart.help.map((text) => make("li", {}, text))));
      const body = entry.shapes.map((each) => {
        const pairs = each.x.map((step, at) => [step, each.y[at]]).filter((pair) => pair[1] !== null);
        const every = Math.max(1, Math.ceil(pairs.length / 8));
        const shown = pairs.filter((_, at) => at % every === 0 || at === pairs.length - 1);
        return make("tr", {}, make("th", { scope: "row" }, each.name), make("td", {}, shown.map(([step, value]) => "step " + number(step) + ": " + number(value)).join(", ")));
      });
      values.append(table(["series", "values"], body, ""));
    });
    charts.push(entry);
    return make("figure", { class: chart.wide ? "card wide" : "card", "data-title": chart.title }, make("figcaption", {}, chart.title, unit ? make("small", {}, unit) : null), box, values);
  }

  function curves() {
    const slider = make("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: "0", id: "smoothing" });
    slider.addEventListener("input", () => {
      smoothing = Number(slider.value);
      drawAll();
    });
    const note = make("p", { class: "muted" }, "Drag to zoom, double-click to zoom out; a click on a name hides its curve. Shaded steps are anomalies, dotted lines the alarms' limits.");
    const node = section("curves", "Curves", make("div", { class: "bar" }, note, labelled("smooth training curves", slider)));
    const groups = new Map();
    for (const chart of data.charts) {
      if (!groups.has(chart.section)) {
        groups.set(chart.section, make("div", { class: "grid" }));
        node.append(make("h3", {}, chart.section), groups.get(chart.section));
      }
      groups.get(chart.section).append(figure(chart));
    }
  }

  // ---- time by phase

  let timePlot = null, timeBox = null, timeRun = 0;

  function phaseColors(run) {
    return new Map(run.phase_seconds.map(([name], at) => [name, at]));
  }

  function times() {
    const node = section("time", "Time");
    const body = runs.map((run, at) => {
      const total = run.phase_seconds.reduce((sum, each) => sum + each[1], 0) || 1;
      const colors = phaseColors(runs[0]);
      const parts = run.phase_seconds.map(([name, value]) =>
        make("span", { class: "part", style: "flex:" + value / total + ";background:" + "var(--series-" + ((colors.get(name) ?? 7) % 8) + ")", title: name + ": " + seconds(value) }, value / total > 0.09 ? name : ""));
      const legend = run.phase_seconds.filter((each) => each[1] / total >= 0.001).map(([name, value]) =>
        make("li", {}, swatch(colors.get(name) ?? 7), make("b", {}, name), " " + (100 * value / total).toFixed(1) + " %, " + seconds(value), make("small", {}, data.phases[name] || "")));
      return make("div", {}, many ? make("h3", {}, swatch(at), run.name) : null, make("div", { class: "stack", role: "img", "aria-label": run.phase_seconds.map(([name, value]) => name + " " + seconds(value)).join(", ") }, parts), make("ul", { class: "legend" }, legend));
    });
    timeBox = make("div", { class: "plot" });
    const choose = many ? labelled("run", select(runs.map((run, at) => [String(at), run.name]), (event) => { timeRun = Number(event.target.value); drawTimes(); })) : null;
    node.append(...body, make("figure", { class: "card wide", "data-title": "Time by phase" }, make("figcaption", {}, "Time by phase", make("small", {}, "s a train step"), choose), timeBox));
  }

  function drawTimes() {
    if (!timeBox) return;
    if (timePlot) timePlot.destroy();
    timePlot = null;
    const run = runs[timeRun];
    const names = run.phase_seconds.map((each) => each[0]).filter((name) => run.curves.values["time/" + name]);
    if (!names.length) return;
    const x = run.curves.x;
    const own = names.map((name) => run.curves.values["time/" + name][0].map((value) => value || 0));
    const stacked = [];
    for (const values of own) {
      const below = stacked[stacked.length - 1];
      stacked.push(values.map((value, at) => value + (below ? below[at] : 0)));
    }
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: { ...grid, size: 4 }, font: "11px " + css("--font") };
    const colors = phaseColors(runs[0]);
    const shade = (name) => color(colors.get(name) ?? 7);
    // The highest stack first, so that each line of the legend is filled down to the one below it.
    const order = names.map((_, at) => at).reverse();
    const series = [{ label: "step" }, ...order.map((at) => ({ label: names[at], stroke: shade(names[at]), fill: shade(names[at]) + "d0", width: 1, points: { show: false }, value: (_, __, ___, place) => (place === null || place === undefined ? "–" : seconds(own[at][place])) }))];
    const bands = order.slice(0, -1).map((_, at) => ({ series: [at + 1, at + 2] }));
    timePlot = new uPlot({
      width: Math.max(240, timeBox.clientWidth), height: 260, series, bands, cursor: { sync: { key: "step" }, points: { show: false } },
      legend: { markers: { width: 0, fill: (_, at) => series[at].stroke } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
      axes: [{ ...axis, size: 32, values: wholeSteps }, { ...axis, size: 56, values: (_, splits) => splits.map(number) }],
    }, [x, ...order.map((at) => stacked[at])], timeBox);
    timePlot.root.setAttribute("role", "img");
    timePlot.root.setAttribute("aria-label", "Seconds of each phase by train step");
  }

  // ---- samples

  const filters = { kind: "all", run: "all", text: "", from: 0, to: Infinity, order: "spread", tokens: "probability" };
  let shownSamples = [], picked = -1, listBox = null, detailBox = null, countBox = null;

  function decoded(sample) {
    const letters = Array.from(sample.text); // characters as Python counts them
    const counts = [];
    let sum = 0;
    for (const digit of sample.chars || "") {
      const value = DIGITS.indexOf(digit);
      sum += value;
      if (value === 63) continue;
      counts.push(sum);
      sum = 0;
    }
    let place = 0;
    return counts.map((count, at) => {
      const text = letters.slice(place, (place += count)).join("");
      const level = DIGITS.indexOf((sample.logprobs || "")[at]) / 63;
      const logprob = sample.logprobs ? -12 * level * level : null;
      const advantage = sample.advantages ? ((DIGITS.indexOf(sample.advantages[at]) - 31) / 31) * sample.scale : sample.advantage;
      return { text, logprob, advantage };
    });
  }

  function tokenSpan(token, largest) {
    const tip = (token.logprob === null ? "" : "probability " + Math.exp(token.logprob).toPrecision(3) + ", log-prob " + token.logprob.toFixed(3)) + (token.advantage === null ? "" : ", advantage " + number(token.advantage));
    const node = make("span", { class: "token", title: tip }, token.text || "∅");
    if (!token.text) node.classList.add("special");
    if (filters.tokens === "probability" && token.logprob !== null) {
      const strength = Math.min(1, Math.sqrt(-token.logprob / 4));
      if (strength > 0.02) node.style.background = "color-mix(in srgb, var(--surprise) " + Math.round(85 * strength) + "%, transparent)";
    } else if (filters.tokens === "advantage" && token.advantage) {
      const strength = Math.min(1, Math.abs(token.advantage) / largest);
      node.style.background = "color-mix(in srgb, var(" + (token.advantage > 0 ? "--better" : "--worse") + ") " + Math.round(12 + 55 * strength) + "%, transparent)";
    }
    return node;
  }

  function matching() {
    const wanted = filters.text.toLowerCase();
    const found = data.samples.list.filter((each) =>
      (filters.kind === "all" || each.kind === filters.kind) && (filters.run === "all" || String(each.run) === filters.run) &&
      each.step >= filters.from && each.step <= filters.to && (!wanted || (each.text + " " + promptText(each) + " " + each.answer + " " + each.id).toLowerCase().includes(wanted)));
    if (filters.order === "spread") return byPrompt(found);
    const by = { step: (a, b) => b.step - a.step, first: (a, b) => a.step - b.step, long: (a, b) => b.num_tokens - a.num_tokens, short: (a, b) => a.num_tokens - b.num_tokens, reward: (a, b) => b.reward - a.reward, punished: (a, b) => a.reward - b.reward };
    return found.sort(by[filters.order]);
  }

  const groupOf = (sample) => [sample.run, sample.step, sample.prompt, sample.kind === "filtered"].join();

  // Whole groups, those first whose rewards differ most, then the newest; within a group the best reward first.
  function byPrompt(found) {
    const spreads = new Map();
    for (const each of data.samples.list) {
      const [low, high] = spreads.get(groupOf(each)) || [Infinity, -Infinity];
      spreads.set(groupOf(each), [Math.min(low, each.reward), Math.max(high, each.reward)]);
    }
    const spread = (each) => { const [low, high] = spreads.get(groupOf(each)); return high - low; };
    return found.sort((a, b) => spread(b) - spread(a) || b.step - a.step || groupOf(a).localeCompare(groupOf(b)) || b.reward - a.reward);
  }

  const promptText = (sample) => data.samples.prompts[sample.prompt].map((turn) => turn[1]).join("\n");

  function refresh() {
    shownSamples = matching();
    const tasks = data.samples.tasks;
    listBox.replaceChildren(...shownSamples.flatMap((each, at) => [
      filters.order === "spread" && (at === 0 || groupOf(each) !== groupOf(shownSamples[at - 1]))
        ? make("p", { class: "group" }, "step " + each.step + (each.kind === "filtered" ? " · filtered out" : "") + ": " + tasks[each.prompt]) : null,
      make("button", { type: "button", class: "sample", "data-at": at, "aria-current": "false", onclick: () => pick(at) },
        make("span", { class: "badge " + each.kind }, KINDS[each.kind]), many ? swatch(each.run) : null,
        make("span", { class: "meta" }, "step " + each.step + " · " + each.num_tokens.toLocaleString("en") + " tokens · reward " + number(each.reward)),
        make("span", { class: "peek" }, (each.text.length > 56 ? "… " : "") + each.text.slice(-56)))]).filter(Boolean));
    countBox.textContent = shownSamples.length + " of " + data.samples.list.length + " samples in this file";
    pick(shownSamples.length ? 0 : -1);
  }

  function pick(at, focus) {
    const buttons = listBox.querySelectorAll("button");
    if (buttons[picked]) buttons[picked].setAttribute("aria-current", "false");
    picked = at;
    if (at < 0) {
      detailBox.replaceChildren(make("p", { class: "empty" }, data.samples.list.length ? "No sample matches." : "The run has no samples on record (telemetry.samples_per_step)."));
      return;
    }
    buttons[at].setAttribute("aria-current", "true");
    if (focus) {
      buttons[at].focus();
      buttons[at].scrollIntoView({ block: "nearest" });
    }
    detailBox.replaceChildren(...detail(shownSamples[at]));
  }

  // The edge before a turn of an episode: its number in the episode, its reward and its calls.
  function turnEdge(turn) {
    const facts = ["turn " + turn.number, ...(turn.cut ? ["cut"] : []), ...(turn.reward ? ["reward " + number(turn.reward)] : []), ...turn.calls];
    return make("small", { class: "turn-edge" }, facts.join(", "));
  }

  // Another stream of an episode, collapsed: what it was sampled after, and its turns.
  function branchView(branch, at) {
    const facts = [branch.turns.length + (branch.turns.length === 1 ? " turn" : " turns"), branch.num_tokens.toLocaleString("en") + " tokens sampled"];
    const observed = (text) => make("span", { class: "token observed", title: "not trained in this branch" }, text);
    return make("details", { class: "values branch" }, make("summary", {}, "branch " + (at + 1) + ": " + branch.reason + " · " + facts.join(" · ")),
      make("div", { class: "response", lang: "" }, observed(branch.prompt), branch.turns.map((turn) => [turnEdge(turn), make("span", { class: "token" }, turn.texts[0]), observed(turn.texts[1])]).flat()));
  }

  function detail(sample) {
    const facts = {
      outcome: sample.outcome, "answer expected": sample.answer, "answer found": sample.extracted ?? "none", reward: number(sample.reward), "why it failed": sample.error,
      ...Object.fromEntries(Object.entries(sample.parts).filter(([, value]) => value && Object.values(sample.parts).filter(Boolean).length > 1).map(([name, value]) => ["reward: " + name, typeof value === "number" ? number(value) : String(value)])),
      advantage: sample.advantage === null ? "not trained" : number(sample.advantage), tokens: sample.num_tokens.toLocaleString("en"),
      "finish reason": sample.finish, "end of the episode": sample.end, ...Object.fromEntries(Object.entries(sample.figures || {}).map(([name, value]) => ["recorded: " + name, number(value)])), "policy version": sample.versions.join(", "), source: sample.source, id: sample.id,
    };
    const tokens = decoded(sample);
    const largest = Math.max(1e-9, ...tokens.map((token) => Math.abs(token.advantage || 0)), sample.advantages ? 0 : 2);
    const text = make("div", { class: "response", lang: "" });
    if (tokens.length) {
      const [head, dropped] = sample.cut || [];
      tokens.forEach((token, at) => {
        if (sample.cut && at === head) text.append(make("span", { class: "cut" }, " … " + dropped.toLocaleString("en") + " tokens left out … "));
        const turn = (sample.turns || []).findIndex((each) => each.tokens[0] <= at && at < each.tokens[2]);
        if (turn >= 0 && sample.turns[turn].tokens[0] === at) text.append(turnEdge(sample.turns[turn]));
        const isObserved = sample.turns && (turn < 0 || at >= sample.turns[turn].tokens[1]);
        text.append(isObserved ? make("span", { class: "token observed", title: "the environment's, not trained" }, token.text) : tokenSpan(token, largest));
      });
    } else text.textContent = sample.text;
    const prompt = data.samples.prompts[sample.prompt];
    return [
      make("div", { class: "detail-head" }, make("span", { class: "badge " + sample.kind }, KINDS[sample.kind]), make("b", {}, "train step " + sample.step), many ? make("span", {}, swatch(sample.run), runs[sample.run].name) : null),
      make("h4", {}, "Prompt"), ...prompt.map(([role, content]) => make("div", { class: "turn" }, make("small", {}, role), make("div", {}, content))),
      make("h4", {}, "Response", tokens.length ? make("small", {}, filters.tokens === "probability" ? "darker: less probable when it was sampled" : "blue: reinforced, orange: discouraged") : make("small", {}, "no token details on record")),
      text,
      ...(sample.branches || []).map(branchView),
      make("dl", { class: "facts" }, Object.entries(facts).filter(([, value]) => value !== "" && value !== undefined && value !== null).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))),
    ];
  }

  function samples() {
    const node = section("samples", "Samples");
    const kinds = make("div", { class: "chips", role: "group", "aria-label": "kind of sample" });
    const counts = { all: data.samples.list.length };
    for (const each of data.samples.list) counts[each.kind] = (counts[each.kind] || 0) + 1;
    for (const kind of ["all", ...Object.keys(KINDS)]) {
      if (!counts[kind] && kind !== "all") continue;
      kinds.append(make("button", { type: "button", "data-kind": kind, "aria-pressed": String(kind === "all"), onclick: (event) => {
        filters.kind = kind;
        for (const each of kinds.children) each.setAttribute("aria-pressed", String(each === event.currentTarget));
        refresh();
      } }, (KINDS[kind] || "all") + " ", make("small", {}, String(counts[kind] || 0))));
    }
    const search = make("input", { type: "search", id: "search", placeholder: "text, answer or id", oninput: (event) => { filters.text = event.target.value; refresh(); } });
    const from = make("input", { type: "number", id: "from", min: "0", class: "short", oninput: (event) => { filters.from = Number(event.target.value) || 0; refresh(); } });
    const to = make("input", { type: "number", id: "to", min: "0", class: "short", oninput: (event) => { filters.to = event.target.value === "" ? Infinity : Number(event.target.value); refresh(); } });
    const order = select([["spread", "by prompt, widest spread of rewards"], ["step", "newest first"], ["first", "oldest first"], ["long", "longest first"], ["short", "shortest first"], ["reward", "best reward first"], ["punished", "worst reward first"]], (event) => { filters.order = event.target.value; refresh(); });
    order.id = "order";
    const shade = select([["probability", "probability"], ["advantage", "advantage"], ["none", "nothing"]], (event) => { filters.tokens = event.target.value; pick(picked); });
    shade.id = "shade";
    const controls = [labelled("search", search), labelled("from step", from), labelled("to", to), labelled("order", order), labelled("tokens show", shade)];
    if (many) controls.splice(1, 0, labelled("run", select([["all", "all runs"], ...runs.map((run, at) => [String(at), run.name])], (event) => { filters.run = event.target.value; refresh(); })));
    listBox = make("div", { id: "sample-list", role: "group", "aria-label": "samples", onkeydown: (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!move || !shownSamples.length) return;
      event.preventDefault();
      pick(Math.min(shownSamples.length - 1, Math.max(0, picked + move)), true);
    } });
    detailBox = make("div", { id: "sample", "aria-live": "polite", tabindex: "0" });
    countBox = make("p", { class: "muted", id: "sample-count" });
    node.append(make("div", { class: "bar" }, kinds), make("div", { class: "bar" }, controls), countBox, make("div", { class: "browser" }, listBox, detailBox));
    refresh();
  }

  // ---- configuration

  const each = (column, at) => (column.length === 1 ? column[0] : column[at]);

  function configuration() {
    const node = section("config", "Configuration");
    const body = make("tbody");
    const count = make("p", { class: "muted", id: "config-count" });
    const search = make("input", { type: "search", id: "config-search", placeholder: "key, value or origin" });
    const which = select([["set", "set by a recipe or option"], ["all", "all keys"], ...(many ? [["differ", "differ between runs"]] : [])], () => fill());
    which.id = "config-which";
    if (many) which.value = "differ";
    search.addEventListener("input", () => fill());
    function fill() {
      const wanted = search.value.toLowerCase();
      const rows = data.config.filter(([key, values, origins]) => {
        const kept = which.value === "all" || (which.value === "differ" ? values.length > 1 : origins.some((origin) => origin !== "default"));
        return kept && (!wanted || [key, ...values, ...origins].join(" ").toLowerCase().includes(wanted));
      });
      body.replaceChildren(...rows.map(([key, values, origins]) =>
        make("tr", { class: values.length > 1 ? "differs" : "" }, make("th", { scope: "row" }, key),
          runs.flatMap((_, at) => [make("td", { class: "value" }, each(values, at)), make("td", { class: "muted" }, each(origins, at))]))));
      count.textContent = rows.length + " of " + data.config.length + " keys";
    }
    const head = ["key", ...runs.flatMap((run) => (many ? [run.name, "origin"] : ["value", "origin"]))];
    const whole = table(head, [], "config-table");
    whole.querySelector("tbody").replaceWith(body);
    node.append(make("div", { class: "bar" }, labelled("search", search), labelled("show", which)), count, whole);
    fill();
  }

  // ---- provenance

  function provenance() {
    const node = section("provenance", "Origin: versions, data, model");
    const rows = [];
    const add = (name, values) => {
      if (values.some(Boolean)) rows.push(make("tr", { class: new Set(values).size > 1 ? "differs" : "" }, make("th", { scope: "row" }, name), values.map((value) => make("td", { class: "value" }, value || "–"))));
    };
    add("commit", runs.map((run) => run.provenance.commit || ""));
    add("machine", runs.map((run) => run.provenance.machine || ""));
    const names = new Set(runs.flatMap((run) => Object.keys(run.provenance.versions || {})));
    for (const name of names) add(name, runs.map((run) => (run.provenance.versions || {})[name] || ""));
    const files = (run) => [...(run.provenance.data || []), ...(run.provenance.model || [])];
    const paths = new Set(runs.flatMap((run) => files(run).map((file) => (file.key ? file.key + ": " : "") + file.path)));
    for (const path of paths) {
      add(path, runs.map((run) => {
        const file = files(run).find((one) => (one.key ? one.key + ": " : "") + one.path === path);
        return !file ? "" : file.sha256 ? file.bytes.toLocaleString("en") + " bytes, sha256 " + file.sha256 : file.bytes ? file.bytes.toLocaleString("en") + " bytes" : "no file";
      }));
    }
    node.append(rows.length ? table(["", ...runs.map((run) => run.name)], rows, "provenance-table") : make("p", { class: "empty" }, "The run has no provenance.json."));
    root.append(make("footer", {}, "megatron_dapo " + data.version + ". Curves: uPlot (MIT). One file, no network."));
  }

  // ---- start

  const chosen = remember("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
  root.replaceChildren();
  header();
  pairs();
  anomalies();
  curves();
  times();
  samples();
  configuration();
  provenance();
  drawAll();
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - width) < 8) return;
    width = root.clientWidth;
    drawAll();
  }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const scroll = remember("scroll");
  if (data.reload_s && scroll) {
    scrollTo(0, Number(scroll));
    remember("scroll", "");
  }
  document.documentElement.dataset.ready = "true";
})();
