"use strict";
// Draws every figure from the JSON in the page; text reaches the page only through the canvas and textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const series = (n) => colour(`--c${n % 11}`);
  const number = (x) => (x === null ? "" : Number(x.toPrecision(4)).toLocaleString("en-US"));
  const sparse = {
    color: () => colour("--ink"),
    callback(value, index, ticks) { // Chart.js leaves out those that would stand too close
      return Chart.Ticks.formatters.logarithmic.call(this, value, index, ticks) === "" ? "" : number(value);
    },
  };
  let charts = [];

  function axis(title, more = {}) {
    return {
      title: { display: true, text: title, color: colour("--faint") },
      ticks: { color: colour("--ink") }, grid: { color: colour("--rule") }, ...more,
    };
  }

  function draw(id, type, chartData, options, plugins = []) {
    const canvas = document.getElementById(id);
    if (!canvas) return;
    const { legend, tooltip, ...rest } = options;
    charts.push(new Chart(canvas, {
      type, data: chartData, plugins,
      options: {
        responsive: true, maintainAspectRatio: false, animation: false, ...rest,
        plugins: {
          legend: { position: "bottom", labels: { color: colour("--ink"), boxWidth: 12, ...(legend || {}) } },
          tooltip: { callbacks: tooltip || {} },
        },
      },
    }));
  }

  function limitLine(value, label) {
    return {
      id: "limit",
      afterDatasetsDraw({ ctx, chartArea, scales }) {
        const y = scales.y.getPixelForValue(value);
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = colour("--limit");
        ctx.setLineDash([6, 4]);
        ctx.beginPath();
        ctx.moveTo(chartArea.left, y);
        ctx.lineTo(chartArea.right, y);
        ctx.stroke();
        ctx.textAlign = "right";
        ctx.textBaseline = "bottom";
        ctx.fillText(label, chartArea.right - 4, y - 4);
        ctx.restore();
      },
    };
  }

  function memory({ stages, parts, usable }) {
    const datasets = parts.map((part, n) => ({
      label: part.name, data: part.gib, backgroundColor: series(n), maxBarThickness: 64,
    }));
    const fullest = Math.max(...stages.map((_, at) => parts.reduce((sum, part) => sum + part.gib[at], 0)));
    const near = fullest > usable / 4; // further away the line would flatten the stack
    draw("memory", "bar", { labels: stages, datasets }, {
      scales: {
        x: axis("stage", { stacked: true, grid: { display: false } }),
        y: axis("GiB per GPU", { stacked: true, suggestedMax: near ? usable * 1.08 : 0 }),
      },
      tooltip: { label: (item) => `${item.dataset.label}: ${number(item.raw)} GiB` },
    }, near ? [limitLine(usable, `${number(usable)} GiB usable`)] : []);
  }

  function communication({ axes, hidden, exposed }) {
    draw("communication", "bar", {
      labels: axes,
      datasets: [
        { label: "exposed: the step waits for it", data: exposed, backgroundColor: series(5), maxBarThickness: 64 },
        { label: "hidden behind compute", data: hidden, backgroundColor: series(4), maxBarThickness: 64 },
      ],
    }, {
      indexAxis: "y",
      scales: { x: axis("seconds per step", { stacked: true }), y: axis("mesh axis", { stacked: true, grid: { display: false } }) },
      tooltip: { label: (item) => `${item.dataset.label}: ${number(item.raw)} s` },
    });
  }

  const labels = {
    id: "labels",
    afterDatasetsDraw(chart) {
      const { ctx } = chart;
      ctx.save();
      ctx.fillStyle = colour("--page");
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.font = "10px system-ui, sans-serif";
      chart.data.datasets.forEach((dataset, n) => {
        if (!chart.isDatasetVisible(n)) return;
        chart.getDatasetMeta(n).data.forEach((bar, i) => {
          const { x, base, y } = bar.getProps(["x", "base", "y"], true);
          const text = dataset.data[i].label;
          if (Math.abs(x - base) > ctx.measureText(text).width + 3) ctx.fillText(text, (x + base) / 2, y);
        });
      });
      ctx.restore();
    },
  };

  function timeline({ stages, kinds, boxes, unit, end }) {
    const datasets = kinds.map((kind, n) => ({
      label: kind, backgroundColor: series([0, 1, 5, 3, 2][n]), grouped: false, barPercentage: 0.9, categoryPercentage: 0.95,
      borderWidth: { left: 0.5, right: 0.5 }, borderColor: colour("--page"), borderSkipped: false, minBarLength: 1,
      data: boxes.filter((box) => box[1] === n).map(([stage, , from, to, label]) => ({ x: [from, to], y: stages[stage], label })),
    })).filter((dataset) => dataset.data.length);
    draw("timeline", "bar", { labels: stages, datasets }, {
      indexAxis: "y",
      scales: {
        x: axis(`time in ${unit}`, { min: 0, max: end, grid: { display: false }, beginAtZero: true }),
        y: axis("", { title: { display: false }, grid: { display: false } }),
      },
      tooltip: {
        title: (items) => items[0].label,
        label: (item) => `${item.raw.label}: ${number(item.raw.x[0])} to ${number(item.raw.x[1])} ${unit}`,
      },
    }, [labels]);
  }

  function front({ points, plan }) {
    draw("front", "scatter", {
      datasets: [
        { label: "this strategy", data: [plan], backgroundColor: series(5), pointRadius: 7, pointStyle: "rectRot" },
        { label: "front: nothing is both faster and smaller", data: points, backgroundColor: series(0), borderColor: series(0),
          showLine: true, stepped: "before", borderWidth: 1, pointRadius: 4 },
      ],
    }, {
      scales: { x: axis("step time in seconds", { type: "logarithmic", ticks: sparse }), y: axis("GiB per GPU") },
      tooltip: { label: (item) => `${item.raw.label}: ${number(item.raw.x)} s, ${number(item.raw.y)} GiB` },
    });
  }

  function scaling({ counts, same, best, ideal }) {
    const line = (label, values, n, more) => ({
      label, data: counts.map((count, i) => ({ x: count, y: values[i] })), spanGaps: true,
      borderColor: series(n), backgroundColor: series(n), pointRadius: 4, ...more,
    });
    draw("scaling", "line", {
      datasets: [
        line("this strategy, more or less data parallel", same, 5, {}),
        line("best strategy at each count", best, 0, {}),
        line("ideal from this strategy", ideal, 6, { borderDash: [5, 4], pointRadius: 0, borderWidth: 1 }),
      ],
    }, {
      scales: {
        x: axis("GPUs", { type: "logarithmic", afterBuildTicks: (scale) => { scale.ticks = counts.map((value) => ({ value })); },
          ticks: { color: colour("--ink"), callback: (value) => value.toLocaleString("en-US") } }),
        y: axis("thousand tokens per second", { type: "logarithmic", ticks: sparse }),
      },
      tooltip: { title: (items) => `${number(items[0].raw.x)} GPUs`, label: (item) => `${item.dataset.label}: ${number(item.raw.y)} k` },
    });
  }

  function all() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    Chart.defaults.font.family = "system-ui, sans-serif";
    memory(data.memory);
    communication(data.communication);
    timeline(data.timeline);
    front(data.front);
    scaling(data.scaling);
    root.dataset.charts = String(charts.length);
  }

  document.querySelectorAll("[data-rem]").forEach((box) => { box.style.height = `${box.dataset.rem}rem`; });
  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
