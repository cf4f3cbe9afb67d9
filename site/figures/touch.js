
// ---- figures to touch: draw(within, values of the controls, the figure's own data) follows them
function touch(name, draw) {
  for (const figure of all(`figure[data-figure=${name}]`)) {
    const controls = all("input, select", figure), own = JSON.parse(figure.dataset.own);
    const value = (control) => control.localName === "select" ? control.value : +control.value;
    const update = () => {
      draw((selector) => all(selector, figure),
        Object.fromEntries(controls.map((control) => [control.name, value(control)])), own);
      for (const select of all("select", figure)) {
        select.nextElementSibling.textContent = select.selectedOptions[0].text;
      }
      for (const shown of all(".value", figure)) {
        shown.previousElementSibling.setAttribute("aria-valuetext", shown.textContent);
      }
    };
    for (const control of controls) control.addEventListener("input", update);
    figure.addEventListener("keydown", (event) => event.stopPropagation()); // its arrows are its own
    find(".controls", figure).disabled = false;
    update();
  }
}
