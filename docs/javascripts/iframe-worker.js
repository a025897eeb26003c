/* Browsers refuse the worker in which the search runs if the site was opened from a file. The search then runs in a
   hidden frame: its script gets a worker's postMessage, and messages as events. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title>"
      this.scope = new Promise(resolve => frame.addEventListener("load", () => {
        const scope = frame.contentWindow, script = scope.document.createElement("script")
        scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
        script.src = new URL(url, location.href)
        script.addEventListener("load", () => resolve(scope))
        scope.document.body.append(script)
      }))
      document.body.append(frame)
      this.terminate = () => frame.remove()
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", {data})))
    }
  }
}
