// Drives a guest through the unmodified npm package e2b. It fails on the first thing that is wrong; when all is well its
// last line is "verdict: ok, N checks". The package's directory comes in E2B_PACKAGE, the home of the default user in
// WARREN_TEST_HOME, that user's id in WARREN_TEST_UID.
'use strict'
const assert = require('node:assert/strict')
const { Sandbox, CommandExitError, FileNotFoundError, NotFoundError, TimeoutError, FileType } = require(process.env.E2B_PACKAGE)

const home = process.env.WARREN_TEST_HOME
const uid = process.env.WARREN_TEST_UID
const dir = `${home}/e2b test ${process.pid}`
const q = (s) => `'${s}'`
let checks = 0
let current = ''

async function check(name, f) {
  current = name
  const began = Date.now()
  await f()
  checks++
  console.log(`ok   ${name} (${Date.now() - began} ms)`)
}

async function until(what, f, ms = 10000) {
  const end = Date.now() + ms
  for (;;) {
    const v = await f()
    if (v) return v
    if (Date.now() > end) throw new Error(`never happened: ${what}`)
    await new Promise((r) => setTimeout(r, 20))
  }
}

async function commands(sbx) {
  await check('a command with output on both streams', async () => {
    const r = await sbx.commands.run('echo out; echo err >&2')
    assert.equal(r.stdout, 'out\n')
    assert.equal(r.stderr, 'err\n')
    assert.equal(r.exitCode, 0)
    assert.equal(r.error, undefined)
  })
  await check('a non-zero exit', async () => {
    await assert.rejects(sbx.commands.run('echo partial; exit 42'), (e) => {
      assert.ok(e instanceof CommandExitError)
      assert.equal(e.exitCode, 42)
      assert.equal(e.stdout, 'partial\n')
      assert.equal(e.error, 'exit status 42')
      return true
    })
  })
  await check('the default user, home and environment', async () => {
    const r = await sbx.commands.run('id -u; echo $HOME; pwd; echo $E2B_SANDBOX; echo $USER')
    const [id, h, , e2b, user] = r.stdout.trim().split('\n')
    assert.equal(id, uid)
    assert.equal(h, home)
    assert.equal(e2b, 'true')
    assert.ok(user)
  })
  await check('another user', async () => {
    assert.equal((await sbx.commands.run('id -u', { user: 'root' })).stdout, '0\n')
    await assert.rejects(sbx.commands.run('id', { user: 'nobody-of-that-name' }), /invalid username: 'nobody-of-that-name'/)
  })
  await check('variables and directory of a command', async () => {
    const r = await sbx.commands.run('echo "$A-$B"; pwd', { envs: { A: '1', B: 'x y' }, cwd: '/usr' })
    assert.equal(r.stdout, '1-x y\n/usr\n')
    await assert.rejects(sbx.commands.run('true', { cwd: '/does/not/exist' }), /cwd/)
  })
  await check('output comes as it is written', async () => {
    const seen = []
    const r = await sbx.commands.run('for i in 1 2 3; do echo line$i; sleep 0.15; done; echo e >&2', {
      onStdout: (s) => { seen.push(s) },
      onStderr: (s) => { seen.push('E' + s) },
    })
    assert.equal(r.stdout, 'line1\nline2\nline3\n')
    assert.ok(seen.length >= 4, `pieces: ${JSON.stringify(seen)}`)
    assert.equal(seen.join(''), 'line1\nline2\nline3\nEe\n')
  })
  await check('much output arrives whole', async () => {
    const r = await sbx.commands.run('seq 1 300000')
    assert.equal(r.stdout.length, 1988895)
    assert.ok(r.stdout.endsWith('\n300000\n'))
  })
  await check('output that is no ASCII', async () => {
    assert.equal((await sbx.commands.run("printf 'zwölf 😀'")).stdout, 'zwölf 😀')
  })
  await check('a background command, listed, waited for', async () => {
    const h = await sbx.commands.run('echo started; sleep 0.3; echo done', { background: true })
    assert.ok(h.pid > 0)
    const listed = (await sbx.commands.list()).find((p) => p.pid === h.pid)
    assert.equal(listed.cmd, '/bin/bash')
    assert.deepEqual(listed.args, ['-l', '-c', 'echo started; sleep 0.3; echo done'])
    const r = await h.wait()
    assert.equal(r.stdout, 'started\ndone\n')
    assert.equal((await sbx.commands.list()).some((p) => p.pid === h.pid), false)
  })
  await check('the pid is the guest\'s, and kill ends it', async () => {
    const h = await sbx.commands.run('sleep 100', { background: true })
    await sbx.commands.run(`kill -0 ${h.pid}`)
    assert.equal(await h.kill(), true)
    await assert.rejects(h.wait(), (e) => e instanceof CommandExitError && e.exitCode === -1 && e.error === 'signal: killed')
    await assert.rejects(sbx.commands.run(`kill -0 ${h.pid}`), CommandExitError)
    assert.equal(await sbx.commands.kill(h.pid), false)
  })
  await check('kill takes the children along', async () => {
    const h = await sbx.commands.run('sleep 12345 & sleep 12345; true', { background: true })
    await until('the children run', async () => (await sbx.commands.run('pgrep -cf "^sleep 12345" || true')).stdout === '2\n')
    await h.kill()
    await until('the children are gone', async () => (await sbx.commands.run('pgrep -cf "^sleep 12345" || true')).stdout === '0\n')
  })
  await check('standard input', async () => {
    const h = await sbx.commands.run('read a; echo "got $a"; cat', { background: true, stdin: true })
    await sbx.commands.sendStdin(h.pid, 'first\nrest')
    await sbx.commands.closeStdin(h.pid)
    assert.equal((await h.wait()).stdout, 'got first\nrest')
  })
  await check('no standard input is an empty one', async () => {
    assert.equal((await sbx.commands.run('wc -c')).stdout.trim(), '0')
  })
  await check('a second client connects', async () => {
    const h = await sbx.commands.run('while [ ! -e /tmp/go-$PPID-$$ ]; do sleep 0.05; done; rm /tmp/go-$PPID-$$; echo after; exit 5', { background: true })
    const out = []
    const c = await sbx.commands.connect(h.pid, { onStdout: (s) => { out.push(s) } })
    assert.equal(c.pid, h.pid)
    await h.disconnect()
    await sbx.commands.run(`touch /tmp/go-$(ps -o ppid= -p ${h.pid} | tr -d ' ')-${h.pid}`)
    await assert.rejects(c.wait(), (e) => e.exitCode === 5 && e.stdout === 'after\n')
    assert.equal(out.join(''), 'after\n')
    await assert.rejects(sbx.commands.connect(999999), (e) => e instanceof NotFoundError || /not.found|no such process/i.test(e.message))
  })
  await check('a timeout ends the command', async () => {
    const began = Date.now()
    await assert.rejects(sbx.commands.run('sleep 54321', { timeoutMs: 700 }), TimeoutError)
    assert.ok(Date.now() - began < 5000)
    await until('the process is gone', async () => (await sbx.commands.run('pgrep -cf "^sleep 54321" || true')).stdout === '0\n')
  })
  await check('a child that keeps the output open does not keep the command', async () => {
    const began = Date.now()
    const r = await sbx.commands.run('sleep 4 & echo $!')
    assert.match(r.stdout, /^\d+\n$/)
    assert.ok(Date.now() - began < 3500)
    await sbx.commands.run(`kill ${r.stdout.trim()}`)
  })
  await check('many at a time', async () => {
    const all = await Promise.all(Array.from({ length: 20 }, (_, i) => sbx.commands.run(`echo ${i}; sleep 0.1`)))
    assert.deepEqual(all.map((r) => r.stdout), Array.from({ length: 20 }, (_, i) => `${i}\n`))
  })
  await check('git through commands', async () => {
    await sbx.git.init(`${dir}/repo`)
    await sbx.files.write(`${dir}/repo/a.txt`, 'a')
    const st = await sbx.git.status(`${dir}/repo`)
    assert.equal(st.fileStatus.length, 1)
  })
}

async function files(sbx) {
  await check('a text file', async () => {
    const info = await sbx.files.write(`${dir}/a.txt`, 'hello wörld')
    assert.deepEqual(JSON.parse(JSON.stringify(info)), { name: 'a.txt', path: `${dir}/a.txt`, type: 'file' })
    assert.equal(await sbx.files.read(`${dir}/a.txt`), 'hello wörld')
    await sbx.files.write(`${dir}/a.txt`, 'short')
    assert.equal(await sbx.files.read(`${dir}/a.txt`), 'short')
  })
  await check('an empty file', async () => {
    await sbx.files.write(`${dir}/empty`, '')
    assert.equal(await sbx.files.read(`${dir}/empty`), '')
    assert.equal((await sbx.files.read(`${dir}/empty`, { format: 'bytes' })).length, 0)
  })
  await check('bytes, blobs and streams', async () => {
    const bytes = Uint8Array.from({ length: 300000 }, (_, i) => (i * 7) & 255)
    await sbx.files.write(`${dir}/b.bin`, bytes.buffer)
    assert.deepEqual(await sbx.files.read(`${dir}/b.bin`, { format: 'bytes' }), bytes)
    await sbx.files.write(`${dir}/c.bin`, new Blob([bytes]))
    const blob = await sbx.files.read(`${dir}/c.bin`, { format: 'blob' })
    assert.equal(blob.size, bytes.length)
    await sbx.files.write(`${dir}/d.bin`, new Blob([bytes]).stream())
    const chunks = []
    for await (const c of await sbx.files.read(`${dir}/d.bin`, { format: 'stream' })) chunks.push(Buffer.from(c))
    assert.ok(Buffer.concat(chunks).equals(Buffer.from(bytes)))
  })
  await check('several files at once', async () => {
    const infos = await sbx.files.write([
      { path: `${dir}/multi/one.txt`, data: '1' },
      { path: `${dir}/multi/deep/er/two.txt`, data: '2' },
      { path: `${dir}/multi/"quoted" ü.txt`, data: '3' },
    ])
    assert.deepEqual(infos.map((i) => i.name), ['one.txt', 'two.txt', '"quoted" ü.txt'])
    assert.equal(await sbx.files.read(`${dir}/multi/deep/er/two.txt`), '2')
    assert.equal(await sbx.files.read(`${dir}/multi/"quoted" ü.txt`), '3')
  })
  await check('a relative path starts at home', async () => {
    const name = `e2b-relative-${process.pid}.txt`
    const info = await sbx.files.write(name, 'r')
    assert.equal(info.path, `${home}/${name}`)
    await sbx.files.remove(name)
  })
  await check('compressed upload and download', async () => {
    await sbx.files.write(`${dir}/z.txt`, 'z'.repeat(100000), { gzip: true })
    assert.equal(await sbx.files.read(`${dir}/z.txt`, { gzip: true }), 'z'.repeat(100000))
  })
  await check('what is said of a file', async () => {
    const i = await sbx.files.getInfo(`${dir}/a.txt`)
    assert.equal(i.name, 'a.txt')
    assert.equal(i.type, FileType.FILE)
    assert.equal(i.path, `${dir}/a.txt`)
    assert.equal(i.size, 5)
    assert.equal(i.mode, 0o644)
    assert.equal(i.permissions, '-rw-r--r--')
    assert.equal((await sbx.commands.run(`stat -c %u ${q(dir + '/a.txt')}`)).stdout.trim(), uid)
    assert.ok(Math.abs(i.modifiedTime.getTime() - Date.now()) < 600000)
    await sbx.commands.run(`ln -sfn a.txt ${q(dir + '/link')}; ln -sfn nowhere ${q(dir + '/broken')}`)
    const l = await sbx.files.getInfo(`${dir}/link`)
    assert.equal(l.type, FileType.FILE)
    assert.equal(l.symlinkTarget, `${dir}/a.txt`)
    assert.match(l.permissions, /^L/)
  })
  await check('metadata', async () => {
    const info = await sbx.files.write(`${dir}/meta.txt`, 'm', { metadata: { author: 'me', 'build-id': '42' } })
    assert.deepEqual(info.metadata, { author: 'me', 'build-id': '42' })
    assert.deepEqual((await sbx.files.getInfo(`${dir}/meta.txt`)).metadata, { author: 'me', 'build-id': '42' })
    await sbx.files.write(`${dir}/meta.txt`, 'm')
    assert.deepEqual((await sbx.files.getInfo(`${dir}/meta.txt`)).metadata ?? {}, {})
  })
  await check('existence', async () => {
    assert.equal(await sbx.files.exists(`${dir}/a.txt`), true)
    assert.equal(await sbx.files.exists(`${dir}/nothing`), false)
    await assert.rejects(sbx.files.read(`${dir}/nothing`), (e) => e instanceof FileNotFoundError || e instanceof NotFoundError)
    await assert.rejects(sbx.files.getInfo(`${dir}/nothing`), (e) => e instanceof FileNotFoundError || e instanceof NotFoundError)
    await assert.rejects(sbx.files.read(dir), /directory/)
  })
  await check('directories', async () => {
    assert.equal(await sbx.files.makeDir(`${dir}/sub/one`), true)
    assert.equal(await sbx.files.makeDir(`${dir}/sub/one`), false)
    await sbx.files.write(`${dir}/sub/one/f`, 'f')
    assert.deepEqual((await sbx.files.list(`${dir}/sub`)).map((e) => e.path), [`${dir}/sub/one`])
    const deep = await sbx.files.list(`${dir}/sub`, { depth: 2 })
    assert.deepEqual(deep.map((e) => [e.path, e.type]), [[`${dir}/sub/one`, 'dir'], [`${dir}/sub/one/f`, 'file']])
    await assert.rejects(sbx.files.list(`${dir}/nothing`), /not exist/)
    await assert.rejects(sbx.files.list(`${dir}/a.txt`), /not a directory/)
  })
  await check('renaming', async () => {
    const info = await sbx.files.rename(`${dir}/sub/one/f`, `${dir}/moved/here/g`)
    assert.equal(info.path, `${dir}/moved/here/g`)
    assert.equal(await sbx.files.exists(`${dir}/sub/one/f`), false)
    assert.equal(await sbx.files.read(`${dir}/moved/here/g`), 'f')
    await assert.rejects(sbx.files.rename(`${dir}/nothing`, `${dir}/x`), /not exist/)
  })
  await check('removing', async () => {
    await sbx.files.remove(`${dir}/moved`)
    assert.equal(await sbx.files.exists(`${dir}/moved/here/g`), false)
    await sbx.files.remove(`${dir}/moved`)
  })
  await check('files belong to the user that is named, and to none else', async () => {
    await sbx.files.write('/root/e2b-secret.txt', 's', { user: 'root' })
    assert.equal((await sbx.commands.run('stat -c %u /root/e2b-secret.txt', { user: 'root' })).stdout, '0\n')
    if (uid !== '0') {
      await sbx.commands.run('chmod 600 /root/e2b-secret.txt', { user: 'root' })
      await assert.rejects(sbx.files.read('/root/e2b-secret.txt'), /permission/)
      await assert.rejects(sbx.files.write('/root/e2b-mine.txt', 'x'), /permission/)
      await assert.rejects(sbx.files.remove('/root/e2b-secret.txt'), /permission/)
      await sbx.commands.run(`ln -sfn /root/e2b-secret.txt ${q(dir + '/trick')}`)
      await assert.rejects(sbx.files.read(`${dir}/trick`), /permission/)
    }
    await sbx.files.remove('/root/e2b-secret.txt', { user: 'root' })
  })
  await check('upload and download by URL', async () => {
    const up = await sbx.uploadUrl(`${dir}/url.txt`)
    const form = new FormData()
    form.append('file', new Blob(['by url']), 'ignored.txt')
    const r = await fetch(up, { method: 'POST', body: form })
    assert.equal(r.status, 200)
    const down = await fetch(await sbx.downloadUrl(`${dir}/url.txt`))
    assert.equal(await down.text(), 'by url')
    const part = await fetch(await sbx.downloadUrl(`${dir}/url.txt`), { headers: { Range: 'bytes=3-5' } })
    assert.equal(part.status, 206)
    assert.equal(await part.text(), 'url')
  })
}

async function watching(sbx) {
  const name = `${dir}/watched`
  await sbx.files.makeDir(name)
  const seen = []
  const has = (type, n) => until(`${type} ${n} in ${JSON.stringify(seen)}`, () => seen.some((e) => e.type === type && e.name === n), 5000).catch((e) => {
    throw new Error(`${e.message}: ${JSON.stringify(seen)}`)
  })
  await check('watching a directory', async () => {
    const w = await sbx.files.watchDir(name, (e) => { seen.push({ type: e.type, name: e.name }) })
    await sbx.files.write(`${name}/f.txt`, 'x')
    await has('create', 'f.txt')
    await has('write', 'f.txt')
    await sbx.commands.run(`chmod 600 ${q(name + '/f.txt')}`)
    await has('chmod', 'f.txt')
    await sbx.files.rename(`${name}/f.txt`, `${name}/g.txt`)
    await has('rename', 'f.txt')
    await has('create', 'g.txt')
    await sbx.files.remove(`${name}/g.txt`)
    await has('remove', 'g.txt')
    await w.stop()
  })
  await check('watching all below', async () => {
    seen.length = 0
    const w = await sbx.files.watchDir(name, (e) => { seen.push({ type: e.type, name: e.name }) }, { recursive: true })
    await sbx.files.write(`${name}/new/deep/h.txt`, 'x')
    await has('create', 'new')
    await has('create', 'new/deep')
    await has('create', 'new/deep/h.txt')
    await sbx.files.write(`${name}/new/deep/h.txt`, 'y')
    await has('write', 'new/deep/h.txt')
    await sbx.files.rename(`${name}/new`, `${name}/old`)
    await has('rename', 'new')
    await sbx.files.write(`${name}/old/deep/i.txt`, 'x')
    await has('create', 'old/deep/i.txt')
    await w.stop()
  })
  await check('watching what cannot be watched', async () => {
    await assert.rejects(sbx.files.watchDir(`${dir}/nothing`, () => {}), /not exist/)
    await assert.rejects(sbx.files.watchDir(`${dir}/a.txt`, () => {}), /not a directory/)
  })
}

async function terminals(sbx) {
  const text = { v: '' }
  const dec = new TextDecoder()
  const onData = (d) => { text.v += dec.decode(d) }
  const enc = (s) => new TextEncoder().encode(s)
  await check('a terminal', async () => {
    const h = await sbx.pty.create({ cols: 90, rows: 30, onData, envs: { MARK: 'm1' } })
    await sbx.pty.sendInput(h.pid, enc('stty size; tty -s && echo is-a-$((1+1))-tty; echo $MARK $TERM\n'))
    await until('the size', () => text.v.includes('30 90'))
    await until('that it is a terminal', () => text.v.includes('is-a-2-tty'))
    await until('its variables', () => text.v.includes('m1 xterm-256color'))
    await sbx.pty.resize(h.pid, { cols: 120, rows: 40 })
    await sbx.pty.sendInput(h.pid, enc('stty size\n'))
    await until('the new size', () => text.v.includes('40 120'))
    await sbx.pty.sendInput(h.pid, enc('sleep 1000\n'))
    await until('sleep runs', async () => (await sbx.commands.run(`pgrep -P ${h.pid} -x sleep || true`)).stdout.trim())
    await sbx.pty.sendInput(h.pid, enc('\x03'))
    await sbx.pty.sendInput(h.pid, enc('echo inter$((40+2))rupted\n'))
    await until('^C reaches the foreground', () => text.v.includes('inter42rupted'))
    await sbx.pty.sendInput(h.pid, enc('exit 7\n'))
    await assert.rejects(h.wait(), (e) => e.exitCode === 7)
  })
  await check('connecting to a terminal', async () => {
    const h = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {} })
    await h.disconnect()
    let out = ''
    const c = await sbx.pty.connect(h.pid, { onData: (d) => { out += dec.decode(d) } })
    await sbx.pty.sendInput(c.pid, enc('echo again$((5*5))\n'))
    await until('output after connecting', () => out.includes('again25'))
    assert.equal(await sbx.pty.kill(c.pid), true)
    await assert.rejects(c.wait(), (e) => e.exitCode === -1)
    assert.equal(await sbx.pty.kill(c.pid), false)
  })
}

async function main() {
  const sbx = await Sandbox.create()
  await check('health', async () => assert.equal(await sbx.isRunning(), true))
  await sbx.files.makeDir(dir)
  try {
    await commands(sbx)
    await files(sbx)
    await watching(sbx)
    await terminals(sbx)
    await check('nothing is left running', () => until('an empty list', async () => (await sbx.commands.list()).length === 0))
  } finally {
    await sbx.files.remove(dir)
  }
  console.log(`verdict: ok, ${checks} checks`)
}

main().then(() => process.exit(0), (e) => {
  console.log(`FAIL ${current}: ${e.stack ?? e}`)
  console.log(`verdict: failed after ${checks} checks`)
  process.exit(1)
})
