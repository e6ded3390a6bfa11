// Charts of `nwise report`, drawn from the numbers in the page; the radio buttons choose the horizontal axis.
"use strict";
const charts = data.charts;

function fitted(layout) {
  const copy = JSON.parse(JSON.stringify(layout));
  if (narrow()) { copy.margin = { ...copy.margin, l: 48, r: 8 }; copy.font = { size: 11 }; }
  return copy;
}

function against(axis) {
  for (const [name, chart] of Object.entries(charts)) {
    if (!chart.axes) continue;
    const data = chart.data.map(trace => ({ ...trace, x: trace.along[axis] }));
    const layout = fitted(chart.layout);
    layout.xaxis = { ...layout.xaxis, title: { text: chart.axes[axis] } };
    Plotly.react(name, data, layout, options);
  }
}

for (const [name, chart] of Object.entries(charts)) {
  if (chart.bars) gantt(name, chart, chart.title);
  else if (!chart.axes) Plotly.newPlot(name, chart.data, fitted(chart.layout), options);
}
for (const button of document.querySelectorAll("input[name=axis]")) {
  button.addEventListener("change", () => against(button.value));
}
if (document.querySelector("input[name=axis]:checked")) against(document.querySelector("input[name=axis]:checked").value);
document.body.dataset.ready = "yes";
