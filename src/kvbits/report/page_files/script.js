"use strict";
/* The page is complete without this: it sorts and filters tables, shows what a mark is, copies, and saves the data. */
(() => {
  const make = (name, fields, ...inside) => {
    const element = Object.assign(document.createElement(name), fields);
    element.append(...inside);
    return element;
  };

  // -- tables ---------------------------------------------------------------------------------------------------------

  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent;
    return text === "–" || text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

  const sort = (table, column, down) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what was not measured stays at the end
      return down ? compare(b, a) : compare(a, b);
    });
    body.append(...rows.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      if (place === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  };

  for (const table of document.querySelectorAll("table")) {
    if (table.tBodies[0].rows.length < 2 || table.tHead.rows[0].cells[0].textContent === "") continue;
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = make("button", { type: "button" }, ...cell.childNodes);
      button.addEventListener("click", () => sort(table, column, cell.getAttribute("aria-sort") === "ascending"));
      cell.append(button);
    });
    if (table.tBodies[0].rows.length < 9) continue;
    const input = make("input", { type: "search", placeholder: "scheme, task, …" });
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase().split(/\s+/);
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word));
      }
    });
    table.parentElement.before(make("p", { className: "filter" }, make("label", {}, "Show only", input)));
  }

  // -- what a mark of a picture is ------------------------------------------------------------------------------------

  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg title")) {
    title.parentElement.dataset.tip = title.textContent;
    title.remove();
  }
  const show = (event) => {
    const mark = event.target.closest?.("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // -- taking things along --------------------------------------------------------------------------------------------

  if (navigator.clipboard) {
    for (const block of document.querySelectorAll(".copy")) {
      const button = make("button", { type: "button" }, "Copy");
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(block.querySelector("code").textContent);
        button.textContent = "Copied";
      });
      block.append(button);
    }
  }
  const data = document.getElementById("data").textContent;
  if (data !== "null") {
    const save = document.getElementById("save");
    save.href = URL.createObjectURL(new Blob([data], { type: "application/json" }));
    save.download = "report.json";
    save.hidden = false;
  }

  // A printed page shows all that is folded away.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
})();
