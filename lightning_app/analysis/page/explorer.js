// Draws the two figures of "Explore the runs" from the JSON beside them, once a reader comes near:
// Plotly is most of the page, and the page opens without it.
"use strict";
const DASHES = ["solid", "dot", "dash", "dashdot"];  // by warm-up, from the longest
function explore() {
  const library = document.createElement("script");
  library.textContent = document.getElementById("plotly").textContent;
  document.head.append(library);
  const data = JSON.parse(document.getElementById("runs").textContent);
  const variants = Object.keys(data.colours).filter(
    (name) => data.runs.some((run) => run.variant === name));
  const several = (key) => new Set(data.runs.map((run) => run[key])).size > 1;
  const axes = [
    { key: "warmup", label: "warm-up (updates)" },
    { key: "lr", label: "learning rate" },
    { key: "seed", label: "seed" },
    { key: "group", label: "other axes" },
  ].filter((axis, index) => index === 0 || several(axis.key));
  const hover = (run) =>
    `<b>${escaped(run.variant)}</b><br>warm-up ${run.warmup}, rate ${run.lr}, seed ${run.seed}` +
    `${run.group === "all" ? "" : "<br>" + escaped(run.group)}<br>${run.word}`;

  function escaped(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  }

  function choices(id, options) {
    const select = document.getElementById(id);
    options.forEach((option, index) => select.add(new Option(option.label, index)));
    return select;
  }

  // Runs whose losses count other things, such as tokens of another tokenizer, share no figure.
  const rulers = [...new Set(data.runs.map((run) => run.ruler))];
  const chosen = (of) => data.runs.filter((run) => !of || run.ruler === rulers[of.value]);

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: colour("--hair"), linecolor: colour("--rule"), zerolinecolor: colour("--hair"),
      automargin: true,
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--ink") } },
      margin: { l: 60, r: 12, t: 12, b: 48 }, hovermode: "closest",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemsizing: "constant" },
      axis,
    };
  }

  // Runs of one warm-up and variant stand side by side, in the order of their seeds.
  const seeds = [...new Set(data.runs.map((run) => run.seed))].sort((a, b) => a - b);

  function points() {
    const x = axes[across.value], y = Number(value.value), look = theme();
    const shown = chosen(ofFinal);
    const ticks = [...new Set(shown.map((run) => run[x.key]))].sort(
      (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
    const traces = variants.map((name, place) => {
      const runs = shown.filter((run) => run.variant === name);
      const within = (run) =>
        ((place + (seeds.indexOf(run.seed) + 0.5) / seeds.length) / variants.length - 0.5) * 0.8;
      return {
        name, type: "scatter", mode: "markers", legendgroup: name,
        x: runs.map((run) => ticks.indexOf(run[x.key]) + within(run)),
        y: runs.map((run) => run.values[y]),
        text: runs.map(hover), customdata: runs.map((run) => run.folder),
        hovertemplate: "%{text}<br>%{y:.4g}<extra></extra>",
        marker: {
          color: data.colours[name], size: 9, line: { color: look.font.color, width: 0.5 },
          symbol: runs.map((run) => (run.state === "ok" ? "circle" : "x")),
        },
      };
    });
    const layout = {
      ...look,
      xaxis: {
        ...look.axis, title: { text: x.label }, tickvals: ticks.map((_, index) => index),
        ticktext: ticks.map((tick) => String(tick)), showgrid: false, zeroline: false,
      },
      yaxis: { ...look.axis, title: { text: data.values[y].label } },
    };
    draw("explore-final", traces, layout);
  }

  function lines() {
    const which = Number(loss.value), look = theme(), logarithmic = along.value === "0";
    const warmups = [...new Set(data.runs.map((run) => run.warmup))].sort((a, b) => b - a);
    const traces = variants.flatMap((name) => warmups.map((warmup, place) => {
      const trace = {
        name, type: "scatter", mode: "lines", x: [], y: [], text: [], customdata: [],
        legendgroup: name, showlegend: place === 0,
        hovertemplate: "%{text}<br>step %{x}: %{y:.4g}<extra></extra>",
        line: { color: data.colours[name], width: 1.2, dash: DASHES[place % DASHES.length] },
        opacity: 0.8,
      };
      const of = (run) => run.variant === name && run.warmup === warmup;
      for (const run of chosen(ofCurves).filter(of)) {
        const [steps, losses] = run.curves[which], text = hover(run);
        // A gap after each run: one trace for many runs draws a hundred times faster than many.
        trace.x.push(...steps, null);
        trace.y.push(...losses, null);
        trace.text.push(...steps.map(() => text), null);
        trace.customdata.push(...steps.map(() => run.folder), null);
      }
      return trace;
    }));
    const layout = {
      ...look,
      xaxis: {
        ...look.axis, title: { text: "optimizer step" }, type: logarithmic ? "log" : "linear",
        ...(logarithmic ? { dtick: 1 } : { nticks: 8 }),
      },
      yaxis: { ...look.axis, title: { text: `${data.curves[which].label} (nats per token)` } },
    };
    draw("explore-curves", traces, layout);
  }

  function draw(id, traces, layout) {
    const place = document.getElementById(id);
    const first = !place.data;
    Plotly.react(place, traces, layout, { responsive: true, displaylogo: false });
    if (first) {
      place.on("plotly_click", (event) => {
        window.open(event.points[0].customdata, "_blank", "noopener");
      });
    }
  }

  const across = choices("explore-final-across", axes);
  const value = choices("explore-final-value", data.values);
  const loss = choices("explore-curves-loss", data.curves);
  const along = choices("explore-curves-along", [{ label: "log scale" }, { label: "linear" }]);
  const kinds = rulers.map((name) => ({ label: name }));
  const [ofFinal, ofCurves] = ["final", "curves"].map(
    (figure) => (rulers.length > 1 ? choices(`explore-${figure}-of`, kinds) : null));
  if (ofFinal) {
    ofFinal.onchange = points;
    ofCurves.onchange = lines;
  }
  across.onchange = value.onchange = points;
  loss.onchange = along.onchange = lines;
  const redraw = () => { points(); lines(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
}
new IntersectionObserver((entries, observer) => {
  if (entries.some((entry) => entry.isIntersecting)) {
    observer.disconnect();
    explore();
  }
}, { rootMargin: "600px" }).observe(document.getElementById("explore"));
