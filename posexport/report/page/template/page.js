"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Numbers by their value, words as people sort them; what has no number comes last either way.
  const compare = (a, b, way) => {
    const [x, y] = [a, b].map((cell) => (cell.dataset.v === undefined ? NaN : Number(cell.dataset.v)));
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    const words = a.textContent.localeCompare(b.textContent, "en", { numeric: true });
    return way * (isNaN(x) ? words : x - y);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const names = table.tHead.rows[table.tHead.rows.length - 1].cells;
    [...names].forEach((name, at) => {
      if (!name.textContent) return;
      const sort = document.createElement("button");
      sort.type = "button";
      sort.textContent = name.textContent;
      name.replaceChildren(sort);
      sort.addEventListener("click", () => {
        const up = name.getAttribute("aria-sort") !== "ascending";
        for (const each of names) each.removeAttribute("aria-sort");
        name.setAttribute("aria-sort", up ? "ascending" : "descending");
        body.append(...[...body.rows].sort((a, b) => compare(a.cells[at], b.cells[at], up ? 1 : -1)));
      });
    });
  }

  // Paper can't be opened: everything is, while it is printed.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed.push(...document.querySelectorAll("details:not([open])"));
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of closed) each.open = false;
    closed = [];
  });
})();
