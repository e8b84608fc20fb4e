// Asking the server: says when it is gone, and when it is back.

let lost = false;
const listeners = [];
export const onState = (f) => listeners.push(f);
const tell = (state, words) => listeners.forEach((f) => f(state, words));

function down(words) {
  if (lost) return;
  lost = true;
  tell("lost", words);
  const again = async () => {
    try {
      const answer = await fetch("/api/state");
      if (answer.ok) {
        lost = false;
        return tell("back");
      }
      if (answer.status === 403) tell("lost", "The server was started again with a new token: open the address that it printed.");
    } catch {
      // still away
    }
    setTimeout(again, 1000);
  };
  setTimeout(again, 700);
}

export class Refused extends Error {}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name !== "AbortError") down("The server does not answer. Trying again …");
    throw error;
  }
  if (answer.ok) return answer;
  const words = (await answer.json().catch(() => ({}))).error || `status ${answer.status}`;
  if (answer.status === 403) down("The server was started again with a new token: open the address that it printed.");
  throw new Refused(words);
}

export const get = async (path, signal) => (await ask(path, { signal })).json();
export const bytes = async (path, signal) => {
  const answer = await ask(path, { signal });
  return { data: await answer.arrayBuffer(), exact: answer.headers.get("X-Exact") !== "0" };
};
export const post = async (path, body) =>
  (await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();

setInterval(() => !lost && !document.hidden && fetch("/api/state").then((a) => a.status === 403 && down("The server was started again with a new token: open the address that it printed."), () => down("The server does not answer. Trying again …")), 4000);
