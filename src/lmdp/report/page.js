(function () {
  "use strict";
  var tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.appendChild(tip);

  // The words of a mark move from its <title> to its label: the browser's own slow tooltip would cover ours.
  // A chart is one stop for the Tab key; the arrow keys go from mark to mark.
  document.querySelectorAll("figure svg").forEach(function (chart) {
    var name = chart.querySelector("title");
    chart.setAttribute("aria-label", name.textContent);
    chart.setAttribute("aria-describedby", chart.querySelector("desc").id);
    chart.removeAttribute("aria-labelledby");
    chart.setAttribute("role", "group");
    name.remove();
    chart.querySelectorAll(".mark").forEach(function (mark, i) {
      var words = mark.querySelector("title");
      mark.setAttribute("aria-label", words.textContent);
      mark.setAttribute("role", "img");
      mark.setAttribute("tabindex", i === 0 ? "0" : "-1");
      words.remove();
    });
  });

  function markOf(event) {
    return event.target instanceof Element ? event.target.closest(".mark[aria-label]") : null;
  }

  function show(mark) {
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    var spot = (mark.querySelector("path[transform]") || mark).getBoundingClientRect();
    var own = tip.getBoundingClientRect();
    var room = document.documentElement.clientWidth;
    var left = spot.left + spot.width / 2 - own.width / 2;
    var above = spot.top - own.height - 8;
    tip.style.left = Math.max(8, Math.min(left, room - own.width - 8)) + "px";
    tip.style.top = (above > 8 ? above : spot.bottom + 8) + "px";
  }

  function hide() {
    tip.hidden = true;
  }

  ["pointerover", "focusin", "click"].forEach(function (kind) {
    document.addEventListener(kind, function (event) {
      var mark = markOf(event);
      if (mark) show(mark);
      else if (kind === "click") hide();
    });
  });
  ["pointerout", "focusout"].forEach(function (kind) {
    document.addEventListener(kind, hide);
  });
  document.addEventListener("scroll", hide, true);

  var steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  document.addEventListener("keydown", function (event) {
    if (event.key === "Escape") hide();
    var mark = markOf(event);
    if (!mark || !(event.key in steps)) return;
    var marks = Array.from(mark.closest("svg").querySelectorAll(".mark"));
    var next = marks[(marks.indexOf(mark) + steps[event.key] + marks.length) % marks.length];
    mark.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
    event.preventDefault();
  });

  // On paper nothing can be unfolded.
  var folded = [];
  window.addEventListener("beforeprint", function () {
    folded = Array.from(document.querySelectorAll("details:not([open])"));
    folded.forEach(function (part) { part.open = true; });
  });
  window.addEventListener("afterprint", function () {
    folded.forEach(function (part) { part.open = false; });
  });
})();
