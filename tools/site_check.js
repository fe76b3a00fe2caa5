// What `tools.site_check` asks of a page that is drawn; it runs in every page before its own scripts.
// a colour that is still changing is none to judge
document.addEventListener('DOMContentLoaded', () => {
  const style = document.head.appendChild(document.createElement('style'));
  style.textContent = '* { transition: none !important; }';
});
globalThis.siteCheck = {
  /** Faults of what is drawn now; on a desk code has to fit. */
  look(desk, scheme) {
    // what the button for light and dark does
    document.body.setAttribute('data-md-color-scheme', scheme === 'dark' ? 'slate' : 'default');
    const article = document.querySelector('article');
    return [...this.sideways(article, desk), ...this.pale()];
  },

  name(one) {
    return `${one.localName} ${JSON.stringify((one.alt ?? one.textContent).trim().slice(0, 50))}`;
  },

  *sideways(article, desk) {
    if (document.documentElement.scrollWidth > innerWidth) yield 'the page goes sideways';
    const style = (one) => getComputedStyle(one);
    const scrolls = (one) => ['auto', 'scroll'].includes(style(one).overflowX);
    for (const one of article.querySelectorAll('pre > code, div')) {
      if (one.scrollWidth <= one.clientWidth + 1 || !scrolls(one)) continue;
      if (desk && one.matches('pre > code')) yield `cut: ${this.name(one)}`;
      if (!style(one).backgroundImage.includes('gradient')) {
        yield `scrolls without an edge that shows it: ${this.name(one)}`;
      }
    }
    const inside = (one) => one !== article && (scrolls(one) || style(one).overflowX === 'hidden'
      || style(one).clipPath !== 'none' || inside(one.parentElement));
    for (const one of article.querySelectorAll('*')) {
      const { width, right } = one.getBoundingClientRect();
      if (width && right > innerWidth + 1 && !inside(one)) {
        yield `beyond the edge: ${this.name(one)}`;
        return;
      }
    }
  },

  /** Words with less contrast than WCAG's AA, once for each two colours. */
  pale() {
    const parts = (colour) => (colour.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
    const over = ([r, g, b, alpha = 1], back) =>
      [r, g, b].map((part, k) => part * alpha + back[k] * (1 - alpha));
    // of every element once: a block of code has thousands of words
    const known = new Map([[null, { back: [255, 255, 255], opacity: 1 }]]);
    const around = (one) => {
      if (!known.has(one)) {
        const { back, opacity } = around(one.parentElement), style = getComputedStyle(one);
        known.set(one, {
          back: over(parts(style.backgroundColor), back), opacity: opacity * style.opacity,
        });
      }
      return known.get(one);
    };
    const luminance = (colour) => {
      const [r, g, b] = colour.map((part) => part / 255)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = new Map(), looked = new Set();
    const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const not_words = 'script, style, noscript, svg, option, .md-search, .headerlink, [hidden]';
    while (words.nextNode()) {
      const one = words.currentNode.parentElement;
      if (!words.currentNode.data.trim() || looked.has(one)) continue;
      looked.add(one);
      if (one.closest(not_words) || !one.checkVisibility({ opacityProperty: true })) continue;
      const { color, fontSize, fontWeight } = getComputedStyle(one), { back, opacity } = around(one);
      const [r, g, b, alpha = 1] = parts(color);
      const both = [luminance(over([r, g, b, alpha * opacity], back)), luminance(back)];
      const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
      const size = parseFloat(fontSize), large = size >= 24 || (size >= 18.66 && fontWeight >= 700);
      const colours = `${color} on ${back.map(Math.round)}`;
      if (ratio < (large ? 3 : 4.5)) {
        found.set(colours, `contrast ${ratio.toFixed(2)} ${this.name(one)}: ${colours}`);
      }
    }
    return found.values();
  },

  /** The smallest label of each picture that is shown, in pixels of the screen. */
  async labels() {
    const found = {};
    for (const image of document.querySelectorAll('article img[src*=".svg"]')) {
      if (!image.checkVisibility()) continue;
      const text = await (await fetch(image.currentSrc)).text();
      const picture = new DOMParser().parseFromString(text, 'image/svg+xml');
      const size = (label) => label.closest('[font-size]')?.getAttribute('font-size') ?? 12;
      const sizes = [...picture.querySelectorAll('text')]
        .filter((label) => label.textContent.trim()).map((label) => parseFloat(size(label)));
      const scale = image.clientWidth / image.naturalWidth;
      found[image.currentSrc.split('/').at(-1)] = scale * Math.min(...sizes, 99);
    }
    return found;
  },

  /** Text of the article, and how many words are in it and in its tables. */
  words() {
    const style = document.head.appendChild(document.createElement('style'));
    style.textContent = '.headerlink, .katex-mathml, article svg, select { display: none !important; }';
    const count = (text) => (text.match(/\S+/g) ?? []).length;
    const tables = [...document.querySelectorAll('article table')].map((one) => count(one.innerText));
    const text = document.querySelector('article').innerText;
    style.remove();
    return [text, count(text), tables.reduce((sum, one) => sum + one, 0)];
  },

  /** What the page is called, and what the navigation calls it. */
  titles() {
    const clean = (one) => one?.textContent.replace('¶', '').trim().replace(/\s+/g, ' ') ?? '';
    const active = document.querySelector('.md-nav--primary a.md-nav__link--active');
    return [clean(document.querySelector('article h1')), clean(active)];
  },

  /** Groups of the navigation whose pages are shown. */
  openGroups() {
    const groups = [...document.querySelectorAll('.md-nav--primary > ul > .md-nav__item--nested')];
    return groups.filter((one) => one.querySelector('nav').checkVisibility({ visibilityProperty: true }))
      .map((one) => one.querySelector('label').textContent.trim());
  },
};
