// The dashboard: asks for what happened since the last time, keeps a window of it, and draws.

import { Chart, el } from "./charts.js";

const PHASES = {
  retrieval: "var(--violet)", admission: "var(--cyan)", queue: "var(--amber)",
  prefill: "var(--blue)", decode: "var(--green)", preempted: "var(--red)",
};
const byId = (id) => document.getElementById(id);
const state = { samples: [], model: "", classes: [], order: "e2e", open: null, life: null, seen: null, fails: 0 };

// ---- numbers as text

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (size >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}
function seconds(value) {
  if (value === 0) return "0";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  const ms = value * 1000;
  return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`;
}
const percent = (value) => `${(100 * value).toFixed(value > 0.999 && value < 1 ? 2 : value >= 0.1 ? 1 : 2).replace(/\.0+$/, "")} %`;
const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString();
const rate = (name) => (sample) => (sample[name] ?? 0) / sample.interval_s;
const stood = (...states) => (sample) => states.reduce((sum, one) => sum + (sample.replicas?.[one] ?? 0), 0);
const rank = (name, n) => (sample) => sample[name]?.[n] ?? null;

// ---- charts

function target(name) {
  return () => {
    const found = state.classes.filter((one) => one.seconds[name] !== undefined);
    return found.map((one) => ({ value: one.seconds[name], name: `${one.slo_class} ${seconds(one.seconds[name])}` }));
  };
}
function percentiles(id, title, name) {
  const colors = ["var(--green)", "var(--blue)", "var(--red)"];
  const series = ["p50", "p95", "p99"].map((one, n) => ({ name: one, color: colors[n], of: rank(name, n) }));
  const goal = name === "itl" ? "tpot" : name;
  return new Chart(byId(id), { title, note: "", series, format: seconds, targets: target(goal) });
}
const charts = [
  new Chart(byId("c-outcomes"), {
    title: "Requests that ended", note: "per second, by outcome", stacked: true, format: number,
    series: [
      { name: "met", color: "var(--green)", of: rate("met") },
      { name: "missed", color: "var(--amber)", of: rate("missed") },
      { name: "refused", color: "var(--red)", of: rate("refused") },
      { name: "client left", color: "var(--grey)", of: rate("left") },
    ],
  }),
  percentiles("c-ttft", "Time to first token", "ttft"),
  percentiles("c-tpot", "Time per output token", "tpot"),
  percentiles("c-itl", "Gap between chunks", "itl"),
  new Chart(byId("c-phases"), {
    title: "Where the time goes", note: "by phase, seconds per second", stacked: true, format: number,
    series: Object.entries(PHASES).map(([name, color]) => (
      { name, color, of: (sample) => (sample.phases?.[name] ?? 0) / sample.interval_s })),
  }),
  new Chart(byId("c-batch"), {
    title: "Batch", note: "requests by what they do", stacked: true, whole: true, format: number, least: 4,
    series: [
      { name: "decoding", color: "var(--green)", of: (s) => s.decoding ?? 0 },
      { name: "in prefill", color: "var(--blue)", of: (s) => s.prefilling ?? 0 },
      { name: "wait in a replica", color: "var(--amber)", of: (s) => s.waiting_inside ?? 0 },
    ],
  }),
  new Chart(byId("c-kv"), {
    title: "KV memory", note: "share of the blocks in use", format: percent, top: 1,
    series: [{ name: "in use", color: "var(--blue)", of: (s) => (s.kv_max ? (s.kv_used ?? 0) / s.kv_max : null) }],
  }),
  new Chart(byId("c-queue"), {
    title: "Queue", note: "requests that wait here for a replica", whole: true, format: number, least: 4,
    series: [{ name: "waiting", color: "var(--amber)", of: (s) => s.waiting ?? 0 }],
  }),
  new Chart(byId("c-tokens"), {
    title: "Tokens", note: "per second", format: number,
    series: [
      { name: "prompt", color: "var(--blue)", of: rate("prompt_tokens") },
      { name: "of them cached", color: "var(--cyan)", of: rate("cached_tokens") },
      { name: "generated", color: "var(--green)", of: rate("generated_tokens") },
    ],
  }),
  new Chart(byId("c-replicas"), {
    title: "Replicas", note: "by state", stacked: true, whole: true, format: number, least: 2,
    series: [
      { name: "ready", color: "var(--green)", of: stood("ready") },
      { name: "draining", color: "var(--grey)", of: stood("draining") },
      { name: "starting", color: "var(--amber)", of: stood("starting") },
      { name: "warm", color: "var(--cyan)", of: stood("warm") },
      { name: "in trouble", color: "var(--red)", of: stood("backoff", "crash_loop", "failed") },
      { name: "are to serve", color: "var(--ink)", line: true, of: (s) => s.wanted ?? 0 },
    ],
  }),
];

// ---- what stands now

// An object whose keys are names that users chose: "constructor" is one of them, and nothing else.
const named = () => Object.create(null);
function total(samples, name) {
  return samples.reduce((sum, one) => sum + (one[name] ?? 0), 0);
}
function worst(samples, name, n) {
  const found = samples.map(rank(name, n)).filter((one) => one !== null);
  return found.length ? Math.max(...found) : null;
}
function tile(name, value, note, kind = "") {
  return el("div", { class: `tile ${kind}` }, el("span", {}, name), el("b", {}, ...[value].flat()), el("i", {}, note));
}
function lateness(value, name) {
  const goals = state.classes.map((one) => one.seconds[name]).filter((one) => one !== undefined);
  if (value === null || !goals.length) return "";
  return value > Math.max(...goals) ? "bad" : value > Math.min(...goals) ? "warn" : "good";
}
function showTiles(all) {
  const now = all.slice(-5), last = all[all.length - 1] ?? {};
  const spent = now.reduce((sum, one) => sum + one.interval_s, 0) || 1;
  const met = total(now, "met"), missed = total(now, "missed"), refused = total(now, "refused");
  const judged = met + missed + refused;
  const objective = Math.min(...state.classes.map((one) => one.objective), 1);
  const goal = state.classes.length ? objective : 0.95;
  const attained = judged ? met / judged : null;
  const ttft = worst(now, "ttft", 1), tpot = worst(now, "tpot", 1);
  const kv = last.kv_max ? (last.kv_used ?? 0) / last.kv_max : null;
  const goals = (name) => state.classes.map((one) => one.seconds[name]).filter((one) => one !== undefined).map(seconds);
  const against = (name) => (goals(name).length ? `target ${[...new Set(goals(name))].join(", ")}` : "no target set");
  byId("tiles").replaceChildren(
    tile("Goodput", [number(met / spent), el("small", {}, " req/s")], `${number(total(now, "arrived") / spent)} req/s arrive`),
    tile("Inside their targets", attained === null ? "–" : percent(attained),
      judged ? `objective ${percent(goal)}` : "no requests in 10 s",
      attained === null ? "" : attained >= goal ? "good" : attained >= goal - 0.05 ? "warn" : "bad"),
    tile("First token, p95", ttft === null ? "–" : seconds(ttft), against("ttft"), lateness(ttft, "ttft")),
    tile("Per token, p95", tpot === null ? "–" : seconds(tpot), against("tpot"), lateness(tpot, "tpot")),
    tile("Refused", [number(refused / spent), el("small", {}, " req/s")], `${number(total(all, "refused"))} in the window`, refused ? "bad" : ""),
    tile("Waiting", number(last.waiting ?? 0), `a newcomer waits ${seconds(last.wait_newcomer_s ?? 0)}`, last.waiting ? "warn" : ""),
    tile("KV memory", kv === null ? "–" : percent(kv), `${number(total(all, "preemptions"))} preemptions in the window`, kv > 0.95 ? "bad" : kv > 0.85 ? "warn" : ""),
    tile("Generated", [number(total(now, "generated_tokens") / spent), el("small", {}, " tok/s")], `${number((last.decoding ?? 0) + (last.prefilling ?? 0))} running`),
  );
}
function showClasses(samples) {
  const sums = named();
  for (const one of samples) {
    for (const [name, counts] of Object.entries(one.classes ?? {})) {
      sums[name] = (sums[name] ?? [0, 0, 0]).map((sum, n) => sum + counts[n]);
    }
  }
  const objectives = Object.assign(named(), Object.fromEntries(state.classes.map((one) => [one.slo_class, one.objective])));
  const names = [...new Set([...state.classes.map((one) => one.slo_class), ...Object.keys(sums)])];
  byId("classes").replaceChildren(...names.map((name) => {
    const [met, missed, refused] = sums[name] ?? [0, 0, 0];
    const all = met + missed + refused, goal = objectives[name];
    const kind = !all || goal === undefined ? "" : met / all >= goal ? "good" : "bad";
    const promised = goal === undefined ? "no targets" : `of ${percent(goal)}`;
    return el("div", { class: `class ${kind}` }, el("b", {}, name), el("em", {}, all ? percent(Math.floor((1000 * met) / all) / 1000) : "–"),
      ` ${promised} `, el("small", {}, `${number(met)} met, ${number(missed)} missed, ${number(refused)} refused`));
  }));
}

// ---- lists

function table(id, heads, rows, empty) {
  const root = byId(id);
  if (!rows.length) {
    root.replaceChildren(el("tbody", {}, el("tr", {}, el("td", { class: "empty" }, empty))));
    return;
  }
  const head = el("tr", {}, ...heads.map(([name, kind]) => el("th", { class: kind }, name)));
  root.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}
function cells(...values) {
  return values.map((one) => (one instanceof Node ? one : el("td", typeof one === "object" && one !== null ? { class: "n" } : {}, String(typeof one === "object" && one !== null ? one.n : one ?? ""))));
}
const n = (value) => ({ n: value });
const STATES = { ready: "good", starting: "warn", draining: "warn", backoff: "bad", crash_loop: "bad", failed: "bad" };

function showReplicas(replicas) {
  const rows = replicas.map((one) => {
    const kind = one.breaker_open ? "bad" : STATES[one.state] ?? "";
    const words = one.breaker_open ? "breaker open" : one.state.replaceAll("_", " ");
    const again = one.starts_in_s === undefined || one.starts_in_s === null ? "" : `starts again in ${seconds(one.starts_in_s)}. `;
    const { first_token, ...stages } = one.start_s ?? {};
    const start_s = Object.values(stages).reduce((sum, taken) => sum + taken, 0);
    const start = el("td", { class: "n", title: Object.entries(one.start_s ?? {}).map(([stage, taken]) => `${stage.replaceAll("_", " ")} ${seconds(taken)}`).join(", ") }, start_s ? seconds(start_s) : "–");
    const used = one.kv_max ? one.kv_used / one.kv_max : 0;
    const meter = el("span", { class: "meter" }, el("span", { width: `${100 * used}%` }));
    return el("tr", {}, ...cells(one.id, one.model, el("td", {}, el("span", { class: `pill ${kind}` }, words)),
      n(`${one.places} of ${one.seats || "–"}`), n(one.running ?? "–"), n(one.waiting ?? "–"),
      one.kv_max ? el("td", {}, meter, percent(used)) : "–",
      n(one.step_s ? seconds(one.step_s) : "–"), start, n(one.losses), el("td", { class: "wide" }, again + one.error)));
  });
  table("replicas", [["replica"], ["model"], ["state"], ["places taken", "n"], ["running", "n"], ["waiting", "n"], ["KV"], ["step", "n"], ["cold start", "n"], ["losses", "n"], [""]], rows, "no replicas");
}
function showScaling(scaling) {
  byId("scaling").replaceChildren(...scaling.map((one) => {
    const short = one.short_of ? `; ${one.short_of} are needed, more than it may have` : "";
    const absent = one.serving ? "" : `; none serves, one is expected in ${seconds(one.ready_in_s)}, requests are ${one.requests_held ? "held" : "refused"}`;
    return el("p", { class: one.short_of ? "short" : "" }, el("b", {}, one.model), ` ${one.wanted} of at most ${one.most} are to serve: ${one.reason.replaceAll("_", " ")}${short}${absent}. A cold start takes ${seconds(one.start_expected_s)}, a warm one ${seconds(one.wake_expected_s)}.`);
  }));
}
function strip(phases, whole) {
  const parts = Object.entries(phases ?? {}).map(([name, spent]) => (
    el("span", { swatch: PHASES[name], width: `${(100 * spent) / whole}%`, title: `${name} ${seconds(spent)}` })));
  return el("div", { class: "strip" }, ...parts);
}
function showSlowest(lists) {
  const rows = [];
  const listed = lists[state.order];
  const chosen = listed.find((one) => one.id === state.open);
  state.chosen = chosen ?? (state.chosen?.id === state.open ? state.chosen : null);
  // What somebody reads stays, also where others are slower by now.
  for (const one of state.chosen && !chosen ? [state.chosen, ...listed] : listed) {
    const isOpen = state.open === one.id;
    const row = el("tr", { class: "pick", tabindex: 0, "aria-expanded": isOpen, "data-id": one.id },
      ...cells(clock(one.at_s), el("td", { class: "mono" }, (one.client_id || one.id).slice(0, 24)), one.model, one.slo_class || "–",
        n(seconds(one.e2e_s)), n(one.ttft_s === null ? "–" : seconds(one.ttft_s)), n(one.tpot_s === null ? "–" : seconds(one.tpot_s)),
        n(`${number(one.prompt_tokens)} + ${number(one.completion_tokens)}`), one.reason, el("td", {}, strip(one.phases, one.e2e_s))));
    const choose = () => pick(one.id);
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    rows.push(row);
    if (isOpen && state.life) rows.push(el("tr", { class: "detail" }, el("td", { colspan: 10 }, waterfall(state.life))));
  }
  const focused = document.activeElement?.dataset?.id;
  table("slowest", [["arrived"], ["request"], ["model"], ["class"], ["whole", "n"], ["first token", "n"], ["per token", "n"], ["tokens", "n"], ["ended"], ["phases"]], rows, "no request has ended in this window");
  if (focused) byId("slowest").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}
function waterfall(life) {
  const ns = 1e-9, whole = Math.max(1, life.ending?.at_ns ?? 0, ...life.phases.map((one) => one.start_ns + one.duration_ns));
  const root = el("div", { class: "fall" });
  for (const one of life.phases) {
    const bar = el("span", { swatch: PHASES[one.phase] });
    bar.style.left = `${(100 * one.start_ns) / whole}%`;
    bar.style.width = `${(100 * one.duration_ns) / whole}%`;
    const lane = el("div", { class: "lane" }, bar);
    if (life.ttft_ns !== null) {
      const mark = el("i", { title: `first token after ${seconds(life.ttft_ns * ns)}` });
      mark.style.left = `${(100 * life.ttft_ns) / whole}%`;
      lane.append(mark);
    }
    root.append(el("div", {}, one.phase), lane, el("div", {}, seconds(one.duration_ns * ns)));
  }
  const facts = life.decisions.map((one) => el("li", {}, `+${seconds(Math.max(0, one.at_ns) * ns)} ${decided(one, ns)}`));
  const ending = life.ending;
  if (ending) {
    facts.push(el("li", {}, `+${seconds(ending.at_ns * ns)} ended: ${ending.reason}${ending.error ? `, ${ending.error}` : ""}; ${ending.prompt_tokens} prompt tokens (${ending.cached_tokens} cached), ${ending.completion_tokens} generated, ${ending.preemptions} preemptions`));
  }
  facts.push(el("li", {}, `steps and what ran beside: sluice trace ${life.id}`));
  return el("div", {}, root, el("ul", { class: "facts" }, ...facts));
}
function decided(one, ns) {
  if (one.route) return `route ${one.route}: ${one.model}, ${one.reason.replaceAll("_", " ")}`;
  if (one.rung) return `${one.rung}${one.model ? `: given to ${one.model}` : `: at most ${one.output_tokens_max} tokens`}`;
  if (one.error) return `attempt ${one.attempt} failed at ${one.replica}: ${one.error}`;
  if (one.reason) return `refused with ${one.status} ${one.reason}`;
  const waited = one.waited_ns === null ? "" : ` after waiting ${seconds(one.waited_ns * ns)}, predicted ${seconds((one.predicted_wait_ns ?? 0) * ns)}`;
  return `given to ${one.replica}${one.attempt > 1 ? `, attempt ${one.attempt}` : ""}${waited}`;
}
async function pick(id) {
  state.open = state.open === id ? null : id;
  state.life = null;
  if (state.open) {
    const answer = await ask(`/dashboard/request?id=${encodeURIComponent(id)}`);
    if (state.open === id && answer.ok) state.life = await answer.json();
  }
  if (state.last) showSlowest(state.last.slowest);
}
function showReasons(samples) {
  const sum = (name) => {
    const sums = named();
    for (const one of samples) for (const [key, count] of Object.entries(one[name] ?? {})) sums[key] = (sums[key] ?? 0) + count;
    return Object.entries(sums);
  };
  const found = [
    ...sum("refusals").map(([name, count]) => [name, count, "var(--red)", "refused"]),
    ...sum("degradations").map(([name, count]) => [name, count, "var(--amber)", "degraded"]),
  ].sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...found.map((one) => one[1]));
  const rows = found.map(([name, count, color, what]) => el("div", { class: "bar" },
    el("span", { title: what }, name.replaceAll("_", " "), el("small", {}, ` ${what}`)),
    el("div", { class: "track" }, el("span", { swatch: color, width: `${(100 * count) / most}%` })),
    el("b", {}, number(count))));
  byId("reasons").replaceChildren(...(rows.length ? rows : [el("div", { class: "empty" }, "Every request was served as asked.")]));
}
function showRefused(refused, since) {
  const rows = refused.filter((one) => one.at_s >= since).map((one) => el("tr", {}, ...cells(clock(one.at_s), one.model || "–", one.slo_class || "–",
    n(one.status), one.reason.replaceAll("_", " "),
    n(one.threshold === undefined ? "" : `${number(one.measured)} / ${number(one.threshold)}`),
    n(one.retry_after_s === undefined || one.retry_after_s === null ? "" : seconds(one.retry_after_s)))));
  table("refused", [["at"], ["model"], ["class"], ["status", "n"], ["reason"], ["measured / limit", "n"], ["retry after", "n"]], rows, "nothing was refused in this window");
}
function showChanges(changes) {
  const rows = changes.slice(0, 30).map((one) => {
    const changed = Object.entries(one.changed ?? {}).map(([key, [before, after]]) => `${key}: ${before || "none"} → ${after || "none"}`);
    const details = Object.entries(one.details ?? {}).map(([key, value]) => `${key}: ${value}`);
    return el("li", {}, el("time", {}, clock(one.at_s)), el("b", {}, one.what), " ", el("small", {}, [...changed, ...details].join("; ")));
  });
  byId("changes").replaceChildren(...(rows.length ? rows : [el("li", { class: "empty" }, "nothing since the start")]));
}

// ---- asking

function key() {
  return sessionStorage.getItem("sluice-key") ?? "";
}
function ask(path) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  return fetch(path, { headers, cache: "no-store" });
}
function say(text, kind) {
  byId("link").textContent = text;
  byId("link").className = `pill ${kind}`;
}
async function refresh() {
  const window_s = Number(byId("window").value), model = byId("model").value;
  if (model !== state.model) Object.assign(state, { model, samples: [] });
  const since = state.samples.length ? state.samples[state.samples.length - 1].t_s : 0;
  const answer = await ask(`/dashboard/data?model=${encodeURIComponent(model)}&since=${since}&window=${window_s}`);
  if (answer.status === 401 || answer.status === 403) {
    byId("ask").hidden = false;
    byId("main").hidden = true;
    byId("ask-error").textContent = key() ? (await answer.json()).error.message : "";
    say("locked", "warn");
    return;
  }
  if (!answer.ok) throw new Error(`${answer.status}`);
  byId("ask").hidden = true;
  byId("main").hidden = false;
  show(await answer.json(), window_s);
  state.fails = 0;
  say("live", "good");
}
function show(told, window_s) {
  if (told.model !== state.model) return;
  const last = state.samples[state.samples.length - 1];
  // A server that was started again counts anew, and its samples begin anew.
  if (last && told.now_s < last.t_s) state.samples = [];
  state.samples = [...state.samples, ...told.samples].slice(-told.samples_max);
  Object.assign(state, { classes: told.classes, last: told });
  byId("version").textContent = told.version;
  document.title = `sluice ${told.version}`;
  const known = [...byId("model").options].map((one) => one.value);
  if (["", ...told.models].join("\n") !== known.join("\n")) {
    byId("model").replaceChildren(...["", ...told.models].map((one) => new Option(one || "all", one, false, one === state.model)));
  }
  const range = [told.now_s - window_s, told.now_s];
  const shown = state.samples.filter((one) => one.t_s >= range[0]);
  const events = told.changes.map((one) => one.at_s);
  for (const chart of charts) chart.show(shown, range, events);
  showTiles(shown);
  showClasses(shown);
  showReasons(shown);
  showReplicas(told.replicas);
  showScaling(told.scaling ?? []);
  showSlowest(told.slowest);
  showRefused(told.refused, range[0]);
  showChanges(told.changes);
}
async function always() {
  try {
    await refresh();
  } catch {
    state.fails += 1;
    say(state.fails > 1 ? "no answer" : "waiting", "bad");
  }
  clearTimeout(state.timer);
  state.timer = setTimeout(always, document.hidden ? 10000 : 2000);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("sluice-key", byId("key").value);
  always();
});
for (const id of ["model", "window"]) byId(id).addEventListener("change", always);
byId("theme").addEventListener("change", (event) => {
  const theme = event.target.value;
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  localStorage.setItem("sluice-theme", theme);
});
const theme = localStorage.getItem("sluice-theme") ?? "";
byId("theme").value = theme;
if (theme) document.documentElement.dataset.theme = theme;
for (const order of ["e2e", "ttft"]) {
  byId(`by-${order}`).addEventListener("click", () => {
    state.order = order;
    for (const one of ["e2e", "ttft"]) byId(`by-${one}`).setAttribute("aria-pressed", String(one === order));
    if (state.last) showSlowest(state.last.slowest);
  });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) always(); });
always();
