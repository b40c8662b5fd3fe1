// The report: sections are drawn in the order in which they come into view.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, waiting = new Map();
let ofTime = null;   // the timeline

// ---- The flame graph is a separate page in an iframe. This code sets its theme and height.
const frame = () => document.querySelector("#flame-place iframe");
function matchFlame() {
  const page = frame() && frame().contentDocument, button = page && page.getElementById("theme");
  if (!button) return;
  page.documentElement.classList.add("embedded");
  if (page.documentElement.dataset.theme !== root.dataset.theme) button.click();
  const around = page.body.scrollHeight - page.getElementById("view").clientHeight, inside = parseInt(page.getElementById("space").style.height, 10);
  frame().style.height = Math.min(640, Math.max(240, around + inside + 16)) + "px";
}

// ---- Theme and print
function theme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  if (ofTime) ofTime.recolour();
  matchFlame();
}
const preference = matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = preference.matches ? "dark" : "light";
preference.addEventListener("change", () => theme(preference.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
document.getElementById("print").addEventListener("click", () => window.print());
let before = root.dataset.theme;
window.addEventListener("beforeprint", () => {
  before = root.dataset.theme;
  for (const place of [...waiting.keys()]) draw(place);
  theme("light");
  if (ofTime) ofTime.printing(true);
});
window.addEventListener("afterprint", () => {
  if (ofTime) ofTime.printing(false);
  theme(before);
});

// ---- Begin
const watch = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) draw(entry.target); }, {rootMargin: "500px"});
function draw(place) {
  const drawing = waiting.get(place);
  watch.unobserve(place);
  waiting.delete(place);
  if (drawing) drawing(place);
}
function later(place, drawing) { waiting.set(place, drawing); watch.observe(place); }

for (const list of document.querySelectorAll(".tabs")) tabs(list);
for (const place of document.querySelectorAll("[data-table]")) table(place, data.tables[place.dataset.table], place.dataset.title);
const heat = document.getElementById("heat-map");
if (heat) heatMap(heat, data.maps.ranks);
later(document.getElementById("flame-place"), (place) => {
  const page = document.getElementById("flame-page").content.cloneNode(true);
  page.querySelector("iframe").addEventListener("load", matchFlame);
  place.append(page);
});
theme(root.dataset.theme);
const place = document.getElementById("timeline-place");
timeline(place, document.getElementById("timeline-data").textContent).then(
  (made) => {
    ofTime = made;
    window.thenceTimeline = made;
    for (const button of document.querySelectorAll("button.moment")) button.addEventListener("click", () => {
      made.zoomTo(Number(button.dataset.from), Number(button.dataset.to));
      place.scrollIntoView({block: "center"});
    });
  },
  (error) => { place.append(element("p", "The timeline needs a browser of 2023 or later: " + error.message, "absent")); },
).finally(() => { window.thenceReady = true; });
