// A button that copies the code of a block.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});

// Browsers let no page on disk fetch another one, so that the search reads its excerpts from page_texts.js.
if (location.protocol === "file:") {
  window.fetch = async (url) => {
    const page = document.createElement("div");
    page.setAttribute("role", "main");
    page.textContent = PAGE_TEXTS[url.replace(/^\.\//, "").replace(/\.html$/, "")] ?? "";
    return { text: async () => page.outerHTML };
  };
}
