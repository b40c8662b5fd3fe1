// Charts: Plotly figures in the page's colours, drawn when they come near the window.

const CONFIG = {displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]};
const ZOOMS = ["spread", "bandwidth"];   // elsewhere the buttons would only hide the legend
const NARROW_PAGE = 640, SHORT_LABEL = 16;

function chartsOf(figures) {
  const drawn = [];
  const colours = () => ({
    "font.color": css("chart"), "hoverlabel.bgcolor": css("raised"), "hoverlabel.bordercolor": css("line"), "hoverlabel.font.color": css("ink"),
    "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": css("faint"), "modebar.activecolor": css("accent"),
  });
  const isBars = (figure) => figure.data.some((trace) => trace.orientation === "h");

  // Long names beside bars leave no room for the bars on a narrow screen: there they are cut, the tip has them in full.
  function cutLabels(place, figure) {
    if (!isBars(figure) || place.clientWidth >= NARROW_PAGE) return {};
    const names = [...new Set(figure.data.flatMap((trace) => trace.y))];
    const cut = (name) => (name.length > SHORT_LABEL ? name.slice(0, SHORT_LABEL).replace(/&[^;]*$/, "") + "…" : name);
    return {"yaxis.tickmode": "array", "yaxis.tickvals": names, "yaxis.ticktext": names.map(cut)};
  }
  async function draw(place) {
    const figure = figures[place.dataset.figure];
    drawn.push(place);
    await Plotly.newPlot(place, figure.data, figure.layout, {...CONFIG, displayModeBar: ZOOMS.includes(place.dataset.figure)});
    await Plotly.relayout(place, {...colours(), ...cutLabels(place, figure)});
    for (const picture of place.querySelectorAll("svg")) picture.setAttribute("aria-hidden", "true");   // the label says what it shows
  }
  function recolour() {
    for (const place of drawn) Plotly.relayout(place, colours());
  }
  function toPaper() {
    const wide = 1030;
    for (const place of drawn) {
      const pair = place.closest(".pair");
      Plotly.relayout(place, {autosize: false, width: pair && pair.children.length > 1 ? wide / 2 - 14 : wide});
    }
  }
  function fromPaper() {
    for (const place of drawn) Plotly.relayout(place, {autosize: true, width: null});
  }
  return {draw, recolour, toPaper, fromPaper};
}
