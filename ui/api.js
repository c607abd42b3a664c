// Asks the program that serves this page. Where it listens to other machines, the link that it printed has a token.

const KEY = "pipeline.token";

/** Takes the token out of the link, so that it stands in no history and in no copied address. */
export function takeToken() {
  const found = /^#token=([0-9a-f]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", "#/");
}

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
}

function address(path, query) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null) parameters.append(name, one);
    }
  }
  const text = parameters.toString();
  return text ? `/api/${path}?${text}` : `/api/${path}`;
}

/** What `path` says; fails with the program's own message. */
export async function ask(path, query = {}, signal) {
  const response = await fetch(address(path, query), { headers: headers(), signal });
  const value = await response.json();
  if (response.ok) return value;
  const failure = new Error(value.error || response.statusText);
  failure.help = value.help;
  throw failure;
}

/** Calls `changed` whenever what `query` names has changed, until the function that it returns is called. */
export function watch(query, changed) {
  const stop = new AbortController();
  (async () => {
    let last;
    while (!stop.signal.aborted) {
      try {
        const response = await fetch(address("changes", query), { headers: headers(), signal: stop.signal });
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          text += value;
          const events = text.split("\n\n");
          text = events.pop();
          const newest = events.pop();
          if (newest !== undefined && newest !== last) {
            last = newest;
            changed();
          }
        }
      } catch (error) {
        if (stop.signal.aborted) return;
      }
      // The program may be started again.
      last = undefined;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  })();
  return () => stop.abort();
}
