// The browser's part of TestPreviewInBrowser: BROWSER MODULES SHOTS LINK OTHER EMPTY.
import { createRequire } from 'node:module';
import readline from 'node:readline';
import assert from 'node:assert/strict';

const [browserPath, modules, shots, link, otherLink, emptyLink] = process.argv.slice(2);
const puppeteer = createRequire(modules + '/node_modules/x')('puppeteer-core');
const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ask = async (word) => {
  console.log(word);
  assert.equal((await lines.next()).value, 'done');
};

const browser = await puppeteer.launch({ executablePath: browserPath, headless: true, args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'] });
try {
  // By the clock: a page behind another one is drawn no more.
  const shows = (page, text) => page.waitForFunction((t) => document.body.innerText.includes(t), { timeout: 120000, polling: 200 }, text);
  const clean = (l) => l.replace(/\?.*/, '');

  // A link is exchanged for a cookie that scripts do not see, and is gone from the bar.
  const page = await browser.newPage();
  page.setDefaultTimeout(120000);
  let hears = 0; // how often the page has been told by Vite that it hears of edits
  page.on('console', (m) => { if (m.text().includes('[vite] connected')) hears++; });
  await page.goto(link);
  await shows(page, 'first');
  assert.equal(page.url(), clean(link));
  assert.equal(await page.evaluate(() => document.cookie + document.referrer), '');
  await page.evaluate(() => { document.cookie = 'who=s'; document.cookie = 'all=1; Domain=localhost'; localStorage.who = 's'; });
  console.log('the page is there, at ' + page.url());

  // Another preview has nothing of that, and lets no page but its own in.
  const other = await browser.newPage();
  other.setDefaultTimeout(120000);
  await other.goto(otherLink);
  await shows(other, 'first');
  assert.equal(await other.evaluate(() => document.cookie + '|' + localStorage.who), '|undefined');
  await other.evaluate(() => { document.cookie = 'who=other'; localStorage.who = 'other'; });
  assert.equal(await page.evaluate(() => document.cookie + '|' + localStorage.who), 'who=s|s');
  const tried = await page.evaluate(async (to) => {
    const fetched = await fetch(to, { credentials: 'include' }).then((r) => 'read ' + r.status, () => 'refused');
    const socket = await new Promise((done) => {
      const s = new WebSocket(to.replace('http', 'ws'), 'vite-hmr');
      s.onopen = () => done('open');
      s.onerror = () => done('refused');
    });
    const own = await fetch('/', { credentials: 'include' }).then((r) => r.status);
    return fetched + ', ' + socket + ', ' + own;
  }, clean(otherLink));
  assert.equal(tried, 'refused, refused, 200');
  console.log('previews are apart');

  // A frame, a window that one opens, and workers come no further.
  const framed = await page.evaluate(async (to) => {
    const frame = document.createElement('iframe');
    const loaded = new Promise((done) => { frame.onload = done; });
    frame.src = to;
    document.body.append(frame);
    await loaded;
    try { return frame.contentWindow.document.body.innerText; } catch (e) { return e.name; }
  }, clean(otherLink));
  assert.equal(framed, 'SecurityError');
  const inFrame = page.frames().find((f) => f !== page.mainFrame());
  assert.ok(!(await inFrame.evaluate(() => document.documentElement.innerHTML)).includes('/src/main.ts'), 'a preview shows in the frame of another');
  const opened = await page.evaluate(async (to) => {
    const w = open(to);
    const tried = [];
    for (let i = 0; i < 50; i++) {
      try { tried.push(w.document.URL); } catch (e) { tried.push(e.name); }
      await new Promise((r) => setTimeout(r, 50));
    }
    try { tried.push(w.localStorage.who); } catch (e) { tried.push(e.name); }
    w.close();
    return tried.filter((t) => t && t !== 'about:blank' && t !== 'SecurityError').join();
  }, clean(otherLink));
  assert.equal(opened, '');
  const workers = await page.evaluate(async (from) => {
    const shared = (url) => new Promise((done) => {
      try {
        const w = new SharedWorker(url);
        w.onerror = () => done('refused');
        w.port.onmessage = (e) => done(e.data);
        w.port.start();
      } catch (e) { done(e.name); }
    });
    const service = (url, scope) => navigator.serviceWorker.register(url, { scope }).then(() => 'registered', (e) => e.name);
    return {
      theirs: [await shared(from + 'shared.js'), await service(from + 'sw.js'), await service('/sw.js', from), await service('/sub/sw.js', '/')],
      own: [await shared('/shared.js'), await service('/sw.js', '/')],
    };
  }, clean(otherLink));
  assert.deepEqual(workers, { theirs: ['SecurityError', 'SecurityError', 'SecurityError', 'SecurityError'], own: ['shared', 'registered'] });
  await page.evaluate(() => navigator.serviceWorker.ready);
  await page.reload();
  assert.equal(await page.evaluate(() => fetch('/taken').then((r) => r.text())), 'taken'); // this one is at work
  await other.reload();
  await shows(other, 'first');
  assert.equal(await other.evaluate(() => navigator.serviceWorker.controller), null);
  assert.notEqual(await other.evaluate(() => fetch('/taken').then((r) => r.text())), 'taken');
  await page.evaluate(async () => { for (const r of await navigator.serviceWorker.getRegistrations()) await r.unregister(); });
  hears = 0;
  await page.reload();
  await shows(page, 'first');
  console.log('frames, windows and workers are apart');

  // Hot reload, over a WebSocket through the preview. An edit before the page listens would not show.
  while (!hears) await new Promise((r) => setTimeout(r, 50));
  await ask('edit');
  await shows(page, 'second');
  await shows(other, 'first');
  await page.screenshot({ path: shots + '/vite.png' });
  console.log('the edit shows');

  // What the open page does by itself does not wake the sandbox; loading it does.
  await ask('pause');
  await new Promise((r) => setTimeout(r, 4000));
  await ask('state');
  await page.goto(clean(link));
  await shows(page, 'second');
  console.log('the sandbox is awake');

  // A port on which nothing listens yet.
  const empty = await browser.newPage();
  await empty.goto(emptyLink);
  await shows(empty, 'Nothing listens there yet');
  await empty.screenshot({ path: shots + '/nothing.png' });
  await ask('serve');
  await empty.waitForFunction(() => !document.title.includes('Nothing') && document.documentElement.innerHTML.includes('src="/src/main.ts"'), { timeout: 60000 });
  console.log('the page came by itself');
} finally {
  await browser.close();
  process.stdin.destroy();
}
