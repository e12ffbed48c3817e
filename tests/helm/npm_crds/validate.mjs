// Reads Kubernetes objects from stdin, as a JSON list. Prints which kinds were checked, and the faults.
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1";
import { PodMonitor, PrometheusRule, ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const models = { HTTPRoute, PodMonitor, PrometheusRule, ScaledObject, ServiceMonitor };
const kinds = new Set();
const faults = [];
for (const document of JSON.parse(readFileSync(0, "utf8"))) {
  const Model = models[document.kind];
  if (Model === undefined) continue;
  kinds.add(document.kind);
  try {
    new Model(document).validate();
  } catch (error) {
    faults.push(`${document.kind} ${document.metadata.name}: ${error.message}`);
  }
}
console.log(JSON.stringify({ kinds: [...kinds].sort(), faults }));
