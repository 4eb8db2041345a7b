// Light or dark; the system decides until somebody chooses.
(() => {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try { return localStorage.getItem("backspot-theme"); } catch { return null; }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const tell = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("backspot-theme", root.dataset.theme); } catch { /* then it is not remembered */ }
    tell();
  });
  dark.addEventListener("change", tell);
  button.hidden = false;
  button.setAttribute("aria-label", "Switch between light and dark");
  tell();
})();
