// Charts: Plotly figures in the page's colours, drawn lazily when they are about to scroll into view.

const CONFIG = {displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]};
const ZOOMS = ["spread", "bandwidth"];   // in other figures the buttons would only hide the legend
const NARROW_PAGE = 640, SHORT_LABEL = 16;

function chartsOf(figures) {
  const drawn = [];
  const colours = () => ({
    "font.color": css("chart"), "hoverlabel.bgcolor": css("raised"), "hoverlabel.bordercolor": css("line"), "hoverlabel.font.color": css("ink"),
    "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": css("faint"), "modebar.activecolor": css("accent"),
  });
  const isBars = (figure) => figure.data.some((trace) => trace.orientation === "h");

  // A narrow screen has room for short names next to bars, and for a legend of several columns. Names are shortened
  // in the middle, because names of one chart often begin alike; the tooltip has the full name. Names are escaped, so
  // an entity counts as one character.
  function cut(name) {
    const characters = name.match(/&[^;]+;|./gu) || [];
    return characters.length > SHORT_LABEL ? [...characters.slice(0, 6), "…", ...characters.slice(7 - SHORT_LABEL)].join("") : name;
  }
  function narrowed(place, figure) {
    if (place.clientWidth >= NARROW_PAGE) return {};
    const legend = {"legend.entrywidth": 74, "legend.font.size": 11};
    if (!isBars(figure)) return legend;
    const names = [...new Set(figure.data.flatMap((trace) => trace.y))];
    return {...legend, "yaxis.tickmode": "array", "yaxis.tickvals": names, "yaxis.ticktext": names.map(cut)};
  }
  async function draw(place) {
    const figure = figures[place.dataset.figure];
    drawn.push(place);
    await Plotly.newPlot(place, figure.data, figure.layout, {...CONFIG, displayModeBar: ZOOMS.includes(place.dataset.figure) && place.clientWidth >= NARROW_PAGE});
    await Plotly.relayout(place, {...colours(), ...narrowed(place, figure)});
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
