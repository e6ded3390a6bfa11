// The data of the page, and charts of what runs when, which the explorer and `nwise report` share.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const narrow = () => window.innerWidth < 640;
const options = { displaylogo: false, displayModeBar: !narrow(), responsive: true };
const show = number => Number(number.toPrecision(4)).toString();

// A bar is [kind, row, micro-batch, loss or null, mini-batch, start, length].
function gantt(id, { rows, bars }, title) {
  const traces = Object.entries(data.kinds).map(([kind, { name, colour }]) => {
    const mine = bars.filter(bar => bar[0] === kind);
    return {
      type: "bar", orientation: "h", name: `${kind}  ${name}`,
      y: mine.map(bar => bar[1]), base: mine.map(bar => bar[5]), x: mine.map(bar => bar[6]),
      marker: { color: colour, line: { color: "white", width: 1 },
        pattern: { shape: mine.map(bar => (bar[4] % 2 ? "/" : "")), size: 6, solidity: 0.25, fillmode: "overlay", fgcolor: "white" } },
      text: mine.map(bar => `${bar[2]}` + (bar[3] === null ? "" : `<sub>${bar[3]}</sub>`)),
      textposition: "inside", insidetextanchor: "middle", textangle: 0, hoverinfo: "text",
      hovertext: mine.map(bar => `<b>${kind}</b> ${name}<br>${rows[bar[1]]}, micro-batch ${bar[2]}, mini-batch ${bar[4]}` +
        (bar[3] === null ? "" : `<br>gradient of loss ${bar[3]}`) + `<br>${show(bar[5])} to ${show(bar[5] + bar[6])}`),
    };
  }).filter(trace => trace.y.length);
  const layout = {
    barmode: "overlay", bargap: 0.12, height: (narrow() ? 250 : 190) + 36 * rows.length, showlegend: true,
    margin: { t: narrow() ? 10 : 30, l: 66, r: 10, b: narrow() ? 160 : 95 },
    template: { layout: { font: { family: "system-ui, sans-serif" } } }, plot_bgcolor: "white",
    xaxis: { title: { text: title, standoff: 6 }, rangemode: "tozero", gridcolor: "#e5e5e5" },
    yaxis: { range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, i) => i), ticktext: rows, fixedrange: true },
    legend: { orientation: "h", yref: "container", y: 0.01, yanchor: "bottom", x: 0 }, hoverlabel: { align: "left" },
  };
  Plotly.react(id, traces, layout, options);
}
