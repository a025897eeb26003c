// What the search of the pages finds: node search.js WORKER INDEX QUERY ...; a line each, the places that it lists in order.
const fs = require("fs"), [worker, index, ...queries] = process.argv.slice(2)
let receive, answer
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => { receive = listener }
globalThis.postMessage = data => answer(data)
require("vm").runInThisContext(fs.readFileSync(worker, "utf8"))
const ask = (type, data) => new Promise(resolve => { answer = resolve; receive({data: {type, data}}) })
ask(0, {...JSON.parse(fs.readFileSync(index)), options: {}}).then(async () => {
  for (const query of queries) {
    const {data} = await ask(2, query)
    console.log(data.items.flat().map(part => part.location).join(" "))
  }
})
