// The page's own script: charts after the text, one time axis for the timeline, sortable tables, the theme switch.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const specs = read("chart-specs");
  const tables = read("chart-data");
  const rows = {};
  const views = new Map();

  // ---- theme: the reader's preference, until they say otherwise ------------------------------------------------
  const root = document.documentElement;
  const dark = () => root.dataset.theme === "dark" ||
    (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const button = document.getElementById("theme");
  const nameTheme = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    nameTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();

  // ---- data: columns to rows, once a name ----------------------------------------------------------------------
  const rowsOf = (name) => {
    if (!rows[name]) {
      const columns = tables[name];
      const names = Object.keys(columns);
      const length = names.length ? columns[names[0]].length : 0;
      rows[name] = Array.from({ length }, (_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]])));
    }
    return rows[name];
  };
  const named = (node, found = new Set()) => {
    if (Array.isArray(node)) node.forEach((n) => named(n, found));
    else if (node && typeof node === "object") {
      if (node.data && typeof node.data.name === "string") found.add(node.data.name);
      Object.values(node).forEach((n) => named(n, found));
    }
    return found;
  };

  // ---- charts ----------------------------------------------------------------------------------------------------
  const ink = "var(--ink)", soft = "var(--soft)", line = "var(--line)";
  const config = {
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    aria: false,
    axis: {
      labelColor: soft, titleColor: soft, domainColor: line, tickColor: line, gridColor: line, gridOpacity: 0.6,
      titleFontWeight: 500, labelFontSize: 11.5, titleFontSize: 11.5, titlePadding: 6, labelOverlap: true,
    },
    legend: {
      labelColor: ink, titleColor: soft, titleFontWeight: 500, orient: "top", labelFontSize: 12, titleFontSize: 12,
      columns: 4, symbolSize: 70,
    },
    title: { color: soft, anchor: "start", fontSize: 12.5, fontWeight: 600, offset: 6 },
    header: { labelColor: ink, titleColor: soft, labelFontSize: 12, titleFontWeight: 500 },
    text: { color: ink, fontSize: 12 },
    bar: { discreteBandSize: { band: 0.7 } },
  };
  // What stands left and right of the lanes of a zoomable chart; their axes have a fixed extent (timeline.py).
  const MARGIN = 114;
  const fit = (spec, width) => {
    const out = structuredClone(spec);
    if (out.vconcat) for (const lane of out.vconcat) lane.width = width - MARGIN;
    else Object.assign(out, { width, autosize: { type: "fit-x", contains: "padding" } });
    out.config = { ...config, legend: { ...config.legend, labelLimit: width - 60 } };
    for (const chart of out.vconcat ?? [out]) legends(chart, width - (out.vconcat ? MARGIN : 60));
    if (width < 480) narrow(out);
    out.datasets = { ...out.datasets };
    for (const name of named(out)) out.datasets[name] ??= rowsOf(name);
    return out;
  };
  // On a narrow screen: names of rows cut shorter, titles of the horizontal axis in lines.
  const narrow = (node) => {
    for (const part of [...(node.layer ?? []), ...(node.vconcat ?? [])]) narrow(part);
    const { x, y } = node.encoding ?? {};
    if (y?.axis?.labelLimit > 155) y.axis.labelLimit = 155;
    for (const holder of [x, x?.axis]) {
      if (typeof holder?.title === "string") holder.title = holder.title.match(/.{1,28}(?:\s|$)|\S+/g).map((t) => t.trim());
    }
  };
  // As many columns as the longest name leaves room for.
  const legends = (node, width) => {
    (node.layer ?? []).forEach((part) => legends(part, width));
    for (const channel of ["color", "shape"]) {
      const drawn = node.encoding?.[channel], names = drawn?.scale?.domain;
      if (!Array.isArray(names) || drawn.legend === null) continue;
      const longest = Math.max(...names.map((name) => String(name).length));
      drawn.legend = { ...drawn.legend, columns: Math.max(1, Math.min(6, Math.floor(width / (longest * 6.8 + 26)))) };
    }
  };
  const draw = async (figure) => {
    const id = figure.dataset.chart;
    const plot = figure.querySelector(".plot");
    const width = Math.floor(plot.clientWidth);
    if (!width) return;
    views.get(id)?.finalize();
    const result = await vegaEmbed(plot, fit(specs[id], width), {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, hover: true,
      tooltip: { theme: "custom" },
    });
    views.set(id, result);
    figure.dataset.width = width;
    figure.dataset.drawn = "yes";
    if (figure.dataset.zoom) zoomable(figure, result.view);
  };

  // ---- one time axis: drag, buttons and keys all set from_s and to_s ------------------------------------------
  const zoomable = (figure, view) => {
    const end = Number(figure.dataset.zoom);
    const set = (from, to) => {
      const span = Math.min(end, Math.max(to - from, end / 5000));
      const start = Math.min(Math.max(0, from), end - span);
      view.signal("from_s", start).signal("to_s", start + span).runAsync();
      figure.dataset.from = start;
      figure.dataset.to = start + span;
      figure.querySelector(".range").textContent = `${start.toPrecision(4)} s to ${(start + span).toPrecision(4)} s`;
    };
    const by = (shift, factor) => {
      const from = view.signal("from_s"), to = view.signal("to_s"), span = to - from, middle = (from + to) / 2;
      set(middle + shift * span - (span * factor) / 2, middle + shift * span + (span * factor) / 2);
    };
    const acts = { in: () => by(0, 0.5), out: () => by(0, 2), left: () => by(-0.4, 1), right: () => by(0.4, 1), all: () => set(0, end) };
    figure.querySelectorAll("[data-act]").forEach((b) => { b.onclick = acts[b.dataset.act]; });
    const plot = figure.querySelector(".plot");
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all", Escape: "all" };
    plot.onkeydown = (e) => {
      if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      acts[keys[e.key]]();
    };
    const svg = plot.querySelector("svg");
    const band = plot.querySelector(".band") ?? plot.appendChild(Object.assign(document.createElement("div"), { className: "band" }));
    const left = () => svg.getBoundingClientRect().left - plot.getBoundingClientRect().left + view.origin()[0] + view.padding().left;
    const width = () => figure.dataset.width - MARGIN;
    const clamp = (x) => Math.min(Math.max(x - left(), 0), width());
    let start = null;
    const x = (e) => clamp(e.clientX - plot.getBoundingClientRect().left);
    plot.onpointerdown = (e) => {
      if (e.button !== 0 || e.pointerType === "touch") return;
      start = x(e);
      plot.setPointerCapture(e.pointerId);
    };
    plot.onpointermove = (e) => {
      if (start === null) return;
      const now = x(e);
      Object.assign(band.style, { display: "block", left: `${left() + Math.min(start, now)}px`, width: `${Math.abs(now - start)}px` });
    };
    plot.onpointerup = (e) => {
      if (start === null) return;
      const now = x(e), from = view.signal("from_s"), scale = (view.signal("to_s") - from) / width();
      if (Math.abs(now - start) > 4) set(from + Math.min(start, now) * scale, from + Math.max(start, now) * scale);
      start = null;
      band.style.display = "none";
    };
    plot.ondblclick = acts.all;
  };

  // ---- sortable tables -----------------------------------------------------------------------------------------
  document.querySelectorAll("table.sortable th button").forEach((head) => {
    head.addEventListener("click", () => {
      const th = head.closest("th"), body = th.closest("table").tBodies[0];
      const up = th.getAttribute("aria-sort") !== "ascending";
      const key = (tr) => {
        const cell = tr.cells[th.cellIndex];
        return cell.dataset.value === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.value);
      };
      const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
      const sorted = [...body.rows].map((tr) => [key(tr), tr]);
      sorted.sort(([a], [b]) => (up ? 1 : -1) * (typeof a === typeof b ? compare(a, b) : typeof a === "number" ? 1 : -1));
      body.append(...sorted.map(([, tr]) => tr));
      th.closest("tr").querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });

  // ---- a table's rows by words, and by column=value, column>value, column<value --------------------------------
  document.querySelectorAll("input[data-filter]").forEach((input) => {
    const table = document.getElementById(input.dataset.filter).querySelector("table");
    const bodyRows = [...table.tBodies[0].rows], count = input.parentElement.querySelector("output");
    const heads = [...table.tHead.rows[0].cells].map((th) => th.textContent.trim().toLowerCase());
    const texts = bodyRows.map((tr) => [...tr.cells].map((td) => td.textContent.trim().toLowerCase()));
    const numberOf = (td) => (td.dataset.value === undefined ? NaN : Number(td.dataset.value));
    const test = (word) => {
      const [, name, sign, value] = /^([^=<>]+)([=<>])(.*)$/.exec(word) ?? [];
      const column = name === undefined ? -1 : heads.findIndex((head) => head.startsWith(name));
      if (column < 0) return (i) => texts[i].some((text) => text.includes(word));
      if (value === "") return () => true;
      if (sign === "=") return (i) => texts[i][column] === value || numberOf(bodyRows[i].cells[column]) === Number(value);
      return (i) => (sign === "<" ? numberOf(bodyRows[i].cells[column]) < Number(value) : numberOf(bodyRows[i].cells[column]) > Number(value));
    };
    input.addEventListener("input", () => {
      const tests = input.value.toLowerCase().split(/\s+/).filter(Boolean).map(test);
      let kept = 0;
      bodyRows.forEach((tr, i) => {
        tr.hidden = !tests.every((t) => t(i));
        kept += tr.hidden ? 0 : 1;
      });
      count.textContent = `${kept} of ${bodyRows.length}`;
    });
  });

  // ---- copy buttons -----------------------------------------------------------------------------------------------
  document.querySelectorAll("[data-copy]").forEach((b) => {
    b.addEventListener("click", async () => {
      const text = document.getElementById(b.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
        b.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(document.getElementById(b.dataset.copy));
        b.textContent = "Selected: press Ctrl+C";
      }
      setTimeout(() => { b.textContent = "Copy"; }, 2500);
    });
  });

  // ---- text first, charts after: one a frame, those in sight before those below -------------------------------
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  let printing = false;
  const drawAll = async () => {
    for (const figure of figures) {
      if (!printing) await new Promise((done) => setTimeout(done));
      if (figure.dataset.drawn) continue; // drawn for print meanwhile
      try {
        await draw(figure);
      } catch (error) {
        figure.dataset.drawn = "failed";
        figure.querySelector(".plot").textContent = "This chart could not be drawn; its numbers stand in the table below.";
        console.error(figure.dataset.chart, error);
      }
    }
    root.dataset.ready = "yes";
    hold.remove();
  };
  // A frame that is still written holds the page's load event: who prints or captures at load gets the charts.
  const hold = document.createElement("iframe");
  if (figures.length) {
    hold.hidden = true;
    root.append(hold);
    hold.contentDocument.open();
  }
  let begun = false;
  const begin = () => {
    if (begun) return;
    begun = true;
    if (!figures.length) {
      root.dataset.ready = "yes";
      return;
    }
    root.dataset.charts = performance.now();
    const script = document.createElement("script");
    script.textContent = document.getElementById("vega").textContent;
    document.head.append(script);
    drawAll();
  };
  // Not at the first paint of any kind: that may be the background alone, and the charts' script would delay the text.
  // Browsers that show the page to nobody (headless, mail previews, a tab in the background) may never report one.
  const tells = PerformanceObserver.supportedEntryTypes?.includes("paint");
  if (tells) {
    new PerformanceObserver((list) => {
      if (list.getEntriesByName("first-contentful-paint").length) setTimeout(begin);
    }).observe({ type: "paint", buffered: true });
  }
  setTimeout(begin, tells && !document.hidden ? 900 : 300);
  // What is printed before that waits for nothing: drawing takes no timer then.
  addEventListener("beforeprint", () => {
    printing = true;
    if (begun) drawAll();
    else begin();
  });
  addEventListener("afterprint", () => { printing = false; });

  // What is folded has no width: it is drawn when it is opened.
  for (const fold of document.querySelectorAll("details:has(figure[data-chart])")) {
    fold.addEventListener("toggle", () => { if (fold.open && begun) drawAll(); });
  }

  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const figure of figures) {
        if (Math.abs(figure.querySelector(".plot").clientWidth - figure.dataset.width) > 8) draw(figure);
      }
    }, 200);
  });
})();
