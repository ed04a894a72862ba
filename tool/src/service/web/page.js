'use strict';

// Every text from the service becomes a text node: a program may call itself anything.
const element = (tag, className, ...children) => {
    const node = document.createElement(tag);
    node.className = className ?? '';
    node.append(...children.map(child => child instanceof Node ? child : String(child)));
    return node;
};

const bytes = value => {
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
    let unit = 0;
    while (value >= 1024 && unit + 1 < units.length) { value /= 1024; unit += 1; }
    return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
};

const age = seconds => seconds < 60 ? `${seconds} s` : seconds < 3600 ? `${Math.floor(seconds / 60)} min`
    : seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;

// The same name has the same colour on every page.
const colour = name => {
    let hash = 7;
    for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
    return `hsl(${hash % 360} 60% ${45 + hash % 3 * 8}%)`;
};

const fill = (id, titles, rows, nothing) => {
    const table = document.getElementById(id);
    if (rows.length === 0) {
        table.replaceChildren(element('tr', '', element('td', 'none', nothing)));
        return;
    }
    const numeric = title => title.startsWith('#');
    const head = element('tr', '', ...titles.map(title =>
        element('th', numeric(title) ? 'number' : '', title.replace('#', ''))));
    const body = rows.map(row => element('tr', '', ...row.map((cell, column) =>
        cell instanceof Node && cell.tagName === 'TD' ? cell
            : element('td', numeric(titles[column]) ? 'number' : '', cell))));
    table.replaceChildren(head, ...body);
};

const part = (name, kind, size, total) => {
    const node = element('div', kind);
    node.style.width = `${100 * size / total}%`;
    if (kind !== 'others') node.style.background = colour(name);
    node.title = `${name}: ${bytes(size)}${kind === 'committed' ? '' : `, ${kind}`}`;
    return node;
};

const bar = (device, domains) => {
    const parts = [];
    for (const domain of domains.filter(domain => domain.device === device.physical)) {
        for (const [kind, size] of [['committed', domain.bytes], ['uncommitted', domain.uncommitted],
                                    ['superseded', domain.superseded]]) {
            if (size > 0) parts.push(part(domain.name, kind, size, device.total));
        }
    }
    const others = device.total - device.free - device.held;
    if (device.total > 0 && others > 0) parts.push(part('other processes', 'others', others, device.total));
    const text = device.problem ? `does not answer: ${device.problem}`
        : device.total > 0 ? `${bytes(device.held)} held, ${bytes(device.free)} free of ${bytes(device.total)}`
        : 'not looked at yet';
    const label = element('div', '', `NPU ${device.physical} `, element('small', '', device.identity),
        element('br'), element('small', device.problem ? 'problem' : '', text));
    return element('div', 'device', label, element('div', 'bar', ...parts));
};

const show = seen => {
    const state = document.getElementById('state');
    state.className = seen.keeper === 0 ? 'problem' : '';
    state.textContent = seen.keeper === 0
        ? `The process that owned the memory is gone. Front ${seen.front}.`
        : `Keeper ${seen.keeper}, front ${seen.front}`;
    document.getElementById('devices').replaceChildren(...seen.devices.map(device => bar(device, seen.domains)));
    fill('domains', ['domain', '#NPU', 'state', '#version', '#held', '#readers', '#waiting', '#age'],
        seen.domains.map(domain => {
            const key = element('span', 'key');
            key.style.background = colour(domain.name);
            return [element('td', '', key, domain.name), domain.device, element('td', domain.state, domain.state),
                domain.version, bytes(domain.bytes + domain.uncommitted + domain.superseded), domain.readers,
                domain.waiting, age(domain.age)];
        }), 'Nothing is served.');
    fill('waiting', ['process', 'program', 'domain', 'why', '#age'],
        seen.clients.filter(client => client.waits !== '').map(client =>
            [client.process, client.program, client.domain ?? '', element('td', 'waiting', client.waits), age(client.age)]),
        'Nobody waits.');
    fill('clients', ['process', 'user', 'container', 'program', 'role', 'domain', '#bytes', '#age'],
        seen.clients.filter(client => client.domain !== null).map(client =>
            [client.process, client.user, client.container || '–', client.program, client.role, client.domain,
                bytes(client.bytes), age(client.age)]), 'No process has a role.');
    fill('events', ['time', 'domain', 'event'], seen.events.slice().reverse().map(event =>
        [element('td', '', element('time', '', new Date(1000 * event.time).toISOString().slice(11, 19))),
            event.domain ?? '', event.text]), 'Nothing has happened.');
};

const look = async () => {
    try {
        const answer = await fetch('/status.json');
        const seen = await answer.json();
        if (answer.ok) show(seen);
        else throw new Error(seen.problem);
        document.documentElement.dataset.ready = seen.domains.length;
    } catch (error) {
        const state = document.getElementById('state');
        state.className = 'problem';
        state.textContent = `The service does not answer: ${error.message}`;
        document.documentElement.dataset.ready = 'problem';
    }
    setTimeout(look, 2000);
};
look();
