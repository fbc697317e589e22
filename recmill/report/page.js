// Works in a sandboxed frame without an origin: no storage, no requests, no navigation.
(function () {
  "use strict";

  // Inside a srcdoc frame "#data" may resolve against the parent's address, so scroll instead of following the link.
  document.querySelectorAll('a[href^="#"]').forEach(function (link) {
    link.addEventListener("click", function (event) {
      var target = document.getElementById(link.getAttribute("href").slice(1));
      if (target) { event.preventDefault(); target.scrollIntoView(); }
    });
  });

  document.querySelectorAll("table.sortable").forEach(function (table) {
    var body = table.tBodies[0];
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      while (head.firstChild) { button.appendChild(head.firstChild); }
      head.appendChild(button);
      button.addEventListener("click", function () { sortBy(table, body, head, column); });
    });
  });

  function sortBy(table, body, head, column) {
    var isNumeric = head.classList.contains("num");
    var current = head.getAttribute("aria-sort");
    // Sort numbers in descending order first.
    var descending = current ? current === "ascending" : isNumeric;
    var rows = Array.prototype.slice.call(body.rows).map(function (row) {
      var cell = row.cells[column];
      return { row: row, text: cell.textContent.trim(), number: cell.hasAttribute("data-sort") ? Number(cell.dataset.sort) : null };
    });
    rows.sort(function (a, b) {
      if (isNumeric && (a.number === null || b.number === null)) { return (a.number === null) - (b.number === null); }
      var order = isNumeric ? a.number - b.number : a.text.localeCompare(b.text, undefined, { numeric: true });
      return descending ? -order : order;
    });
    rows.forEach(function (entry) { body.appendChild(entry.row); });
    table.querySelectorAll("th").forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  }

  // Every mark has its text in <title>; with scripting, one tooltip shows the nearest point of each line.
  var tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.appendChild(tip);

  document.querySelectorAll("svg.lines").forEach(function (svg) {
    var groups = [];
    svg.querySelectorAll("g").forEach(function (group) {
      var points = Array.prototype.map.call(group.querySelectorAll(".pt"), function (mark) {
        var title = mark.querySelector("title");
        mark.setAttribute("aria-label", title.textContent);
        title.remove();
        return { x: Number(mark.getAttribute("cx")), text: mark.getAttribute("aria-label") };
      });
      if (points.length) { groups.push(points); }
    });
    // The drawing's own <title> would cover the tooltip; its aria-label says the same.
    if (groups.length) { svg.querySelector("title").remove(); }
    var cross = document.createElementNS(svg.namespaceURI, "line");
    cross.setAttribute("class", "crosshair");
    svg.addEventListener("pointermove", function (event) { showNearest(svg, cross, groups, event); });
    svg.addEventListener("pointerleave", function () { tip.hidden = true; cross.remove(); });
  });

  function showNearest(svg, cross, groups, event) {
    var box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    var x = (event.clientX - box.left) * view.width / box.width;
    var nearest = groups.map(function (points) {
      return points.reduce(function (best, point) { return Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best; });
    });
    if (!nearest.length) { return; }
    tip.textContent = "";
    nearest.slice(0, 10).forEach(function (point) {
      tip.appendChild(document.createElement("div")).textContent = point.text;
    });
    tip.hidden = false;
    var left = event.clientX + 14;
    if (left + tip.offsetWidth > window.innerWidth - 8) { left = event.clientX - tip.offsetWidth - 14; }
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
    var place = nearest.reduce(function (best, point) { return Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best; }).x;
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.setAttribute("y1", 34);
    cross.setAttribute("y2", view.height - 46);
    svg.insertBefore(cross, svg.firstChild);
  }

  // Expand all details for printing.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (details) { details.open = true; });
  });
})();
