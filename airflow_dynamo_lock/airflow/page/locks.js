// The Locks page: a table of all locks, and for one of them its holders, its queue and the actions.
//
// Airflow's web interface imports this module, and gives it React. There is no build step and no other dependency.
// All text of the table is put into the page as text, never as HTML.

const React = globalThis.React;
const h = React.createElement;
const { useCallback, useEffect, useRef, useState } = React;

const SERVICE = new URL(".", import.meta.url).pathname; // …/dynamo-lock/
const AIRFLOW = SERVICE.replace(/dynamo-lock\/$/, ""); // the base path of the web interface
const PAGE = 100;

const STYLE = `
.dynamo-lock { padding: 1rem; color: var(--chakra-colors-fg, inherit); font-size: 0.875rem; }
.dynamo-lock h1 { font-size: 1.5rem; font-weight: 600; margin: 0 0 0.75rem; }
.dynamo-lock h2 { font-size: 1.1rem; font-weight: 600; margin: 1rem 0 0.5rem; overflow-wrap: anywhere; }
.dynamo-lock form, .dynamo-lock .line { display: flex; flex-wrap: wrap; gap: 0.75rem; align-items: end; margin-bottom: 0.75rem; }
.dynamo-lock label { display: flex; flex-direction: column; gap: 0.2rem; font-size: 0.8rem; color: var(--chakra-colors-fg-muted, inherit); }
.dynamo-lock input, .dynamo-lock select, .dynamo-lock textarea { font: inherit; color: var(--chakra-colors-fg, inherit);
  background: var(--chakra-colors-bg, Canvas); border: 1px solid var(--chakra-colors-border-emphasized, #888);
  border-radius: 0.25rem; padding: 0.35rem 0.5rem; }
.dynamo-lock button { font: inherit; cursor: pointer; border: 1px solid var(--chakra-colors-border-emphasized, #888);
  border-radius: 0.25rem; padding: 0.3rem 0.7rem; background: var(--chakra-colors-bg, Canvas); color: var(--chakra-colors-fg, inherit); }
.dynamo-lock button.plain { border: 0; padding: 0; background: none; text-align: left; font-weight: 600; overflow-wrap: anywhere; }
.dynamo-lock button.danger { background: #b91c1c; border-color: #b91c1c; color: #fff; }
.dynamo-lock button:disabled { opacity: 0.5; cursor: default; }
.dynamo-lock :focus-visible { outline: 2px solid #2563eb; outline-offset: 2px; }
.dynamo-lock a { text-decoration: underline; color: var(--chakra-colors-fg-info, LinkText); }
.dynamo-lock .scroll { overflow-x: auto; }
.dynamo-lock table { width: 100%; border-collapse: collapse; }
.dynamo-lock caption { text-align: left; padding: 0.25rem 0; color: var(--chakra-colors-fg-muted, inherit); }
.dynamo-lock th, .dynamo-lock td { text-align: left; vertical-align: top; padding: 0.4rem 0.75rem 0.4rem 0;
  border-bottom: 1px solid var(--chakra-colors-border, #ccc); overflow-wrap: anywhere; }
.dynamo-lock th { white-space: nowrap; font-weight: 600; }
.dynamo-lock td.number { text-align: right; font-variant-numeric: tabular-nums; }
.dynamo-lock tr[aria-current] { background: var(--chakra-colors-bg-muted, #8882); }
.dynamo-lock .muted { color: var(--chakra-colors-fg-muted, inherit); }
.dynamo-lock .message { border-left: 4px solid #b45309; padding: 0.5rem 0.75rem; margin: 0.5rem 0; background: var(--chakra-colors-bg-muted, #8882); }
.dynamo-lock .track { position: relative; height: 1rem; min-width: 14rem; background: var(--chakra-colors-bg-muted, #8882); }
.dynamo-lock .track span { position: absolute; top: 0; bottom: 0; min-width: 2px; }
.dynamo-lock .waited { background: repeating-linear-gradient(135deg, #b45309 0 3px, transparent 3px 6px); }
.dynamo-lock .held { background: #2563eb; }
.dynamo-lock .swatch { display: inline-block; width: 1.5rem; height: 0.7rem; margin-right: 0.25rem; }
.dynamo-lock ul { margin: 0; padding-left: 0; list-style: none; }
.dynamo-lock dialog { max-width: 36rem; border-radius: 0.5rem; border: 1px solid var(--chakra-colors-border, #888); padding: 1.25rem;
  color: var(--chakra-colors-fg, CanvasText); background: var(--chakra-colors-bg, Canvas); margin: auto; }
.dynamo-lock dialog::backdrop { background: #0008; }
`;

const STATES = { all: "All", held: "Held", waiting: "Waited for", free: "Free", lost: "Lease lost before" };

const COLUMNS = [
  ["key", "Lock"],
  [null, "State"],
  [null, "Held by"],
  ["held", "Held for"],
  ["heartbeat", "Last heartbeat"],
  ["waiting", "Waiting"],
  ["waited", "Longest wait"],
];

/** A rough duration, in the largest unit of which it has two. */
function duration(seconds) {
  for (const [unit, length] of [["days", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

const secondsBetween = (from, to) => (from && to ? Math.max(0, (Date.parse(to) - Date.parse(from)) / 1000) : null);

/** Send a request to the service. An answer that is no success is an error with its sentence. */
async function request(path, body) {
  const options = body
    ? { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-Dynamo-Lock": "1" } }
    : {};
  const answer = await fetch(SERVICE + path, { credentials: "same-origin", ...options });
  const found = await answer.json().catch(() => ({}));
  if (answer.ok) return found;
  const said = typeof found.detail === "string" ? found.detail : null;
  if (answer.status === 401) throw new Error("You are no longer logged in: load the page again.");
  if (answer.status === 403) throw new Error(said && said !== "Forbidden" ? said : "You may not do this: it needs the permission to edit pools, and looking needs the permission to read them.");
  throw new Error(said || `The API server answered with ${answer.status}.`);
}

/** Read something again and again, while the page is visible. Returns the answer, the error, and a function to read now. */
function usePolled(path, seconds) {
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const wanted = useRef(path);
  const again = useRef(() => {});
  useEffect(() => {
    wanted.current = path;
    let timer = null;
    let over = false;
    const read = async () => {
      clearTimeout(timer);
      if (document.hidden || over || !path) return;
      let pause = seconds;
      try {
        const found = await request(path);
        if (over || wanted.current !== path) return;
        setAnswer(found);
        setError(null);
        pause = found.next_seconds || seconds;
      } catch (failure) {
        if (over) return;
        setError(failure.message);
      }
      timer = setTimeout(read, 1000 * pause);
    };
    again.current = read;
    document.addEventListener("visibilitychange", read);
    read();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", read);
    };
  }, [path, seconds]);
  return [answer, error, useCallback(() => again.current(), [])];
}

function Owner({ link, owner }) {
  return link ? h("a", { href: AIRFLOW + link }, owner) : owner;
}

function Holder({ holder }) {
  const notes = [
    holder.slots > 1 ? `${holder.slots} slots` : "",
    holder.inside ? `${holder.inside} inside` : "",
    holder.state,
    holder.ours ? "" : "another library",
  ].filter(Boolean);
  return h("li", null, h(Owner, holder), notes.length ? h("span", { className: "muted" }, ` (${notes.join(", ")})`) : null);
}

function HeldBy({ row, now }) {
  if (row.holders.length) return h("ul", null, row.holders.slice(0, 5).map((each) => h(Holder, { key: each.lease_id, holder: each })),
    row.holders.length > 5 ? h("li", { className: "muted" }, `and ${row.holders.length - 5} more`) : null);
  if (!row.previous) return null;
  const ago = secondsBetween(row.previous.until, now);
  return h("span", { className: "muted" }, `last held by ${row.previous.owner}${ago === null ? "" : `, until ${duration(ago)} ago`}`);
}

function oldestHeartbeat(row, now) {
  const ages = row.holders.map((each) => secondsBetween(each.heartbeat, now)).filter((age) => age !== null);
  return ages.length ? `${duration(Math.max(...ages))} ago` : "";
}

function Heading({ column, sort, title, descending, onSort }) {
  if (!column) return h("th", { scope: "col" }, title);
  const active = column === sort;
  return h("th", { scope: "col", "aria-sort": active ? (descending ? "descending" : "ascending") : "none" },
    h("button", { className: "plain", type: "button", onClick: () => onSort(column) },
      title, h("span", { "aria-hidden": true }, active ? (descending ? " ▼" : " ▲") : "")));
}

/** A dialog that says what will happen, asks for a reason, and shows the outcome. */
function Dialog({ action, onDone }) {
  const dialog = useRef(null);
  const [reason, setReason] = useState("");
  const [capacity, setCapacity] = useState(action.capacity === undefined ? "" : String(action.capacity));
  const [outcome, setOutcome] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    const asked = { ...action.body, reason };
    if (action.capacity !== undefined) asked.capacity = capacity === "" ? null : Number(capacity);
    try {
      setOutcome({ text: (await request(action.path, asked)).outcome, done: true });
    } catch (failure) {
      setOutcome({ text: failure.message, done: false });
    }
    setBusy(false);
  };
  return h("dialog", { ref: dialog, "aria-labelledby": "dynamo-lock-title", onClose: () => onDone(outcome) },
    h("h2", { id: "dynamo-lock-title", style: { marginTop: 0 } }, action.title),
    h("p", null, action.text),
    outcome ? h("p", { className: "message", role: "status" }, outcome.text) : null,
    outcome && outcome.done
      ? h("button", { type: "button", autoFocus: true, onClick: () => dialog.current.close() }, "Close")
      : h("form", { onSubmit: send },
          action.capacity === undefined ? null : h("label", null, "Number of slots; empty lets claims decide",
            h("input", { type: "number", min: 1, value: capacity, onChange: (event) => setCapacity(event.target.value) })),
          h("label", { style: { flexBasis: "100%" } }, "Reason",
            h("textarea", { required: true, maxLength: 200, rows: 2, value: reason, onChange: (event) => setReason(event.target.value) })),
          h("button", { type: "submit", className: "danger", disabled: busy || !reason.trim() }, action.button),
          h("button", { type: "button", onClick: () => dialog.current.close() }, "Cancel")));
}

function Details({ conn, lockKey, mayAct, onAct, onClose }) {
  const [answer, error] = usePolled(`queue?${new URLSearchParams({ conn, key: lockKey })}`, 3);
  const heading = useRef(null);
  useEffect(() => heading.current.focus(), [lockKey]);
  const body = { conn, key: lockKey };
  const row = answer ? answer.lock : null;
  return h("section", { "aria-labelledby": "dynamo-lock-details" },
    h("div", { className: "line" },
      h("h2", { id: "dynamo-lock-details", ref: heading, tabIndex: -1 }, lockKey),
      h("button", { type: "button", onClick: onClose }, "Close"),
      row && mayAct && row.kind !== "readers"
        ? h("button", { type: "button", onClick: () => onAct({ path: "capacity", body, capacity: row.pinned ? row.capacity : "",
            title: `Set the capacity of ${lockKey}`, button: "Set",
            text: "The capacity overrides that of all DAGs until it is unset. No holder loses its lease." }) }, "Set capacity…") : null),
    error ? h("p", { className: "message", role: "alert" }, error) : null,
    row && row.loss ? h("p", null, `The last lost lease was that of ${row.loss.owner}: ${row.loss.text}.`) : null,
    row ? h("div", { className: "scroll" }, h("table", null,
      h("caption", null, row.holders.length ? "Holders." : "No holder.", row.token ? ` The last grant has the fencing token ${row.token}.` : ""),
      row.holders.length ? h("thead", null, h("tr", null, ["Holder", "Since", "Last heartbeat", "Inside", "Actions"].map((title) => h("th", { key: title, scope: "col" }, title)))) : null,
      h("tbody", null, row.holders.map((each) => h("tr", { key: each.lease_id },
        h("td", null, h("ul", null, h(Holder, { holder: each }))),
        h("td", null, each.since ? new Date(each.since).toLocaleString() : ""),
        h("td", null, each.heartbeat ? `${duration(secondsBetween(each.heartbeat, answer.now))} ago` : ""),
        h("td", { className: "number" }, each.inside),
        h("td", null, mayAct ? h("button", { type: "button", "aria-label": `Break the lease of ${each.owner}`, onClick: () => onAct({ path: "break", body: { ...body, lease_id: each.lease_id },
          title: `Break the lease of ${each.owner}`, button: "Break",
          text: "The next waiter gets the lock within seconds. A holder that still works stops only at its next heartbeat: until then, two may be at work." }) }, "Break…") : null)))))) : null,
    answer ? h("div", { className: "scroll" }, h("table", null,
      h("caption", null, answer.waiters.length ? `Queue: ${row.waiting} waiting` : "Nobody waits."),
      answer.waiters.length ? h("thead", null, h("tr", null, ["", "Waiter", "Since", "Still waits", "Gives up", "Priority", "Actions"].map((title, at) => h("th", { key: at, scope: "col" }, title || "#")))) : null,
      h("tbody", null, answer.waiters.map((each) => h("tr", { key: each.lease_id },
        h("td", { className: "number" }, each.position),
        h("td", null, h(Owner, each)),
        h("td", null, new Date(each.since).toLocaleString()),
        h("td", null, each.expected_wait_seconds === null ? "" : `about ${duration(each.expected_wait_seconds)}`),
        h("td", null, each.until ? new Date(each.until).toLocaleString() : "never"),
        h("td", { className: "number" }, each.priority),
        h("td", null, mayAct ? h("button", { type: "button", "aria-label": `Remove ${each.owner} from the queue`, onClick: () => onAct({ path: "remove", body: { ...body, lease_id: each.lease_id },
          title: `Remove ${each.owner} from the queue`, button: "Remove",
          text: "Its task fails, shows your name and the reason, and does not queue again by itself." }) }, "Remove…") : null)))))) : null,
    h(LastHour, { conn, lockKey }));
}

/** Who held the lock in the last hour, and who waited for it, one below the other on the same axis of time. */
function LastHour({ conn, lockKey }) {
  const [answer, error] = usePolled(`history?${new URLSearchParams({ conn, key: lockKey })}`, 15);
  if (error) return h("p", { className: "message", role: "alert" }, error);
  if (!answer) return null;
  const now = Date.parse(answer.now);
  // The axis begins with the earliest turn, if that began within the hour.
  const begins = answer.turns.map((each) => Date.parse(each.waited_since || each.held_since || each.ended || answer.now));
  const shown = Math.min(1000 * answer.seconds, Math.max(60000, ...begins.map((time) => now - time)));
  const share = (time) => Math.min(100, Math.max(0, 100 * (1 - (now - Date.parse(time)) / shown)));
  const bar = (kind, from, to) => (from ? h("span", { className: kind, style: { left: `${share(from)}%`, width: `${share(to) - share(from)}%` } }) : null);
  const between = (from, to) => (from && to ? duration(secondsBetween(from, to)) : "");
  return h("div", { className: "scroll" }, h("table", null,
    h("caption", null, "The last hour: ", h("span", { className: "swatch waited" }), "waited, ", h("span", { className: "swatch held" }), "held"),
    h("thead", null, h("tr", null, ["Who", `From ${duration(shown / 1000)} ago to now`, "Waited", "Held", "Until"].map((title) => h("th", { key: title, scope: "col" }, title)))),
    h("tbody", null, answer.turns.map((each, at) => {
      const end = each.has_ended ? each.ended : answer.now;
      return h("tr", { key: at },
        h("td", null, h(Owner, each)),
        h("td", null, h("div", { className: "track", "aria-hidden": true },
          bar("waited", each.waited_since, each.held_since || end), end && !(each.waited_since && !each.held_since) ? bar("held", each.held_since || end, end) : null)),
        h("td", null, between(each.waited_since, each.held_since || end)),
        h("td", null, between(each.held_since, end)),
        h("td", null, !each.has_ended ? "now" : each.ended ? new Date(each.ended).toLocaleTimeString() : "not known"));
    }))),
    h("p", { className: "muted" }, "It shows who holds the lock or waits for it now, the previous holder, and the runs of this deployment whose last try was granted the lock. Waits that ended without the lock, and earlier runs of other deployments, are not known here."));
}

function Empty({ answer }) {
  if (answer.total) return h("p", null, "No lock matches.");
  return h("p", { className: "message" }, `The table ${answer.table} has no lock yet. A DAG makes one with the task group DynamoLock, and a shell with “dynamo-lock run”.`);
}

function Locks({ dagId }) {
  const address = new URLSearchParams(globalThis.location.search);
  const [conn, setConn] = useState(address.get("conn") || "");
  const [search, setSearch] = useState(address.get("search") || address.get("key") || "");
  const [state, setState] = useState("all");
  const [deployment, setDeployment] = useState("");
  const [sort, setSort] = useState("key");
  const [descending, setDescending] = useState(false);
  const [offset, setOffset] = useState(0);
  const [chosen, setChosen] = useState(address.get("key"));
  const [action, setAction] = useState(null);
  const [outcome, setOutcome] = useState("");
  const wanted = new URLSearchParams({ conn, search, state, deployment, dag_id: dagId || "", sort, descending, offset, limit: PAGE });
  const [answer, error, readNow] = usePolled(`locks?${wanted}`, 3);
  const onSort = (name) => {
    setDescending(name === sort ? !descending : name !== "key");
    setSort(name);
    setOffset(0);
  };
  const from = (set) => (event) => {
    set(event.target.value);
    setOffset(0);
  };
  const failed = error ? { text: error, help: "" } : answer && answer.error;
  const rows = (answer && answer.rows) || [];
  return h("main", { className: "dynamo-lock" },
    h("style", null, STYLE),
    h("h1", null, "Locks"),
    h("form", { role: "search", onSubmit: (event) => event.preventDefault() },
      h("label", null, "Search", h("input", { type: "search", value: search, onChange: from(setSearch), placeholder: "lock, holder or waiter" })),
      h("label", null, "State", h("select", { value: state, onChange: from(setState) }, Object.entries(STATES).map(([name, title]) => h("option", { key: name, value: name }, title)))),
      h("label", null, "Deployment", h("select", { value: deployment, onChange: from(setDeployment) },
        h("option", { value: "" }, "All"), ((answer && answer.deployments) || []).map((each) => h("option", { key: each, value: each }, each)))),
      answer && answer.connections.length > 1 ? h("label", null, "Connection", h("select", { value: answer.connection, onChange: from((value) => { setConn(value); setChosen(null); }) },
        answer.connections.map((each) => h("option", { key: each, value: each }, each)))) : null),
    failed ? h("div", { className: "message", role: "alert" }, h("p", null, failed.text), failed.help ? h("p", null, failed.help) : null) : null,
    h("p", { role: "status" }, outcome),
    answer ? answer.damaged.map((each) => h("p", { key: each, className: "message" }, each)) : h("p", null, "Reading the locks…"),
    answer && !answer.error ? h(React.Fragment, null,
      rows.length ? h("div", { className: "scroll" }, h("table", null,
        h("caption", null, `${answer.total} ${answer.total === 1 ? "lock" : "locks"} in ${answer.table}, ${answer.held} held, ${answer.waiting} waiting` + (answer.matching === answer.total ? "" : `; ${answer.matching} match`)),
        h("thead", null, h("tr", null, COLUMNS.map(([column, title]) => h(Heading, { key: title, column, sort, title, descending, onSort })))),
        h("tbody", null, rows.map((row) => h("tr", { key: row.key, "aria-current": row.key === chosen ? "true" : undefined },
          h("td", null, h("button", { type: "button", className: "plain", "aria-expanded": row.key === chosen, onClick: () => setChosen(row.key === chosen ? null : row.key) }, row.key)),
          h("td", null, row.state + (row.pinned ? ", set by hand" : "")),
          h("td", null, h(HeldBy, { row, now: answer.now })),
          h("td", null, row.holders.length ? duration(row.held_seconds) : ""),
          h("td", null, oldestHeartbeat(row, answer.now)),
          h("td", { className: "number" }, row.waiting || ""),
          h("td", null, row.waiting ? duration(row.waited_seconds) : "")))))) : h(Empty, { answer }),
      answer.matching > PAGE ? h("nav", { className: "line", "aria-label": "Pages" },
        h("button", { type: "button", disabled: !offset, onClick: () => setOffset(Math.max(0, offset - PAGE)) }, "Previous"),
        h("span", null, `${offset + 1} to ${Math.min(offset + PAGE, answer.matching)} of ${answer.matching}`),
        h("button", { type: "button", disabled: offset + PAGE >= answer.matching, onClick: () => setOffset(offset + PAGE) }, "Next")) : null,
      chosen ? h(Details, { key: JSON.stringify([answer.connection, chosen]), conn: answer.connection, lockKey: chosen, mayAct: answer.may_act, onAct: (wanted) => setAction({ ...wanted, at: performance.now() }), onClose: () => setChosen(null) }) : null) : null,
    action ? h(Dialog, { key: action.at, action, onDone: (ended) => {
      // The browser tells of the end of a dialog a moment later, when the next one may be open already.
      setAction((current) => (current === action ? null : current));
      if (ended && ended.done) {
        setOutcome(ended.text);
        readNow();
      }
    } }) : null);
}

globalThis.Locks = Locks;
globalThis["DAG's locks"] = Locks;

export default Locks;
