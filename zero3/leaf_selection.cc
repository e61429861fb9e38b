#include "evenkeel/zero3/leaf_selection.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

absl::Status Bad(absl::string_view subject, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "select_leaves";
  where.group = std::string(subject);
  return MakeError(absl::StatusCode::kInvalidArgument, where, what);
}

std::string Join(absl::string_view parent, absl::string_view name) {
  return parent.empty() ? std::string(name) : absl::StrCat(parent, ".", name);
}

std::string RuleText(const LeafRule& rule) {
  switch (rule.kind) {
    case LeafRule::Kind::kName:
      return absl::StrCat("name ", rule.pattern);
    case LeafRule::Kind::kGlob:
      return absl::StrCat("glob ", rule.pattern);
    case LeafRule::Kind::kType:
      return absl::StrCat("type ", rule.pattern);
  }
  return "";
}

bool RuleMatches(const LeafRule& rule, absl::string_view full_name, const ModuleNode& module) {
  switch (rule.kind) {
    case LeafRule::Kind::kName:
      return full_name == rule.pattern;
    case LeafRule::Kind::kGlob:
      return GlobMatches(rule.pattern, full_name);
    case LeafRule::Kind::kType:
      return module.type == rule.pattern;
  }
  return false;
}

void AppendOnce(const std::vector<int>& from, std::vector<int>& to) {
  for (int p : from) {
    if (std::find(to.begin(), to.end(), p) == to.end()) to.push_back(p);
  }
}

void CollectParameters(const ModuleNode& module, absl::flat_hash_set<int>& seen, std::vector<int>& out) {
  for (int p : module.parameters) {
    if (seen.insert(p).second) out.push_back(p);
  }
  for (const ModuleNode& child : module.children) CollectParameters(child, seen, out);
}

// One walk over the tree: checks, then chooses.
class Selector {
 public:
  Selector(const ModelDescription& model, const LeafOptions& options)
      : model_(model), options_(options), rule_used_(options.rules.size(), false) {}

  absl::StatusOr<LeafSelection> Run() {
    EK_RETURN_IF_ERROR(CheckParameters());
    EK_RETURN_IF_ERROR(CheckModule(model_.root, ""));
    for (size_t p = 0; p < used_.size(); ++p) {
      if (!used_[p]) return Bad(model_.parameters[p].name, "no module uses this parameter");
    }
    for (size_t r = 0; r < options_.rules.size(); ++r) {
      if (!rule_used_[r]) return Bad(RuleText(options_.rules[r]), "the rule matches no module");
    }
    Visit(model_.root, "");
    return std::move(selection_);
  }

 private:
  absl::Status CheckParameters() {
    if (options_.max_leaf_bytes <= 0) {
      return Bad("max_leaf_bytes", absl::StrCat(options_.max_leaf_bytes, " is not positive"));
    }
    if (options_.granularity_threshold < 0) {
      return Bad("granularity_threshold", absl::StrCat(options_.granularity_threshold, " is negative"));
    }
    absl::flat_hash_set<std::string> names;
    for (const ParameterSpec& spec : model_.parameters) {
      EK_RETURN_IF_ERROR(ValidateParameterSpec(spec));
      if (!names.insert(spec.name).second) return Bad(spec.name, "two parameters have this name");
    }
    used_.assign(model_.parameters.size(), false);
    return absl::OkStatus();
  }

  absl::Status CheckModule(const ModuleNode& module, absl::string_view parent) {
    const std::string full = Join(parent, module.name);
    if (!module_names_.insert(full).second) return Bad(full, "two modules have this full name");
    for (int p : module.parameters) {
      if (p < 0 || p >= static_cast<int>(model_.parameters.size())) {
        return Bad(full, absl::StrCat("parameter index ", p, " is outside [0, ", model_.parameters.size(), ")"));
      }
      used_[static_cast<size_t>(p)] = true;
    }
    for (size_t r = 0; r < options_.rules.size(); ++r) {
      if (RuleMatches(options_.rules[r], full, module)) rule_used_[r] = true;
    }
    for (const ModuleNode& child : module.children) EK_RETURN_IF_ERROR(CheckModule(child, full));
    return absl::OkStatus();
  }

  // Why `module` would be a leaf, or "".
  std::string ReasonFor(const ModuleNode& module, absl::string_view full) const {
    for (const LeafRule& rule : options_.rules) {
      if (RuleMatches(rule, full, module)) return RuleText(rule);
    }
    if (options_.granularity_threshold > 0) {
      const Granularity g = ModuleGranularity(model_, module);
      if (g.eligible && g.value() <= options_.granularity_threshold) {
        return absl::StrCat("granularity ", g.value(), " <= ", options_.granularity_threshold);
      }
    }
    return "";
  }

  int64_t Bytes(const std::vector<int>& parameters) const {
    int64_t bytes = 0;
    for (int p : parameters) bytes += model_.parameters[static_cast<size_t>(p)].num_bytes();
    return bytes;
  }

  void Add(const ModuleNode& module, absl::string_view full, std::vector<int> parameters, std::string reason) {
    if (parameters.empty()) return;
    const int64_t bytes = Bytes(parameters);
    selection_.leaves.push_back({std::string(full), module.type, std::move(parameters), bytes, std::move(reason)});
  }

  void Visit(const ModuleNode& module, absl::string_view parent) {
    const std::string full = Join(parent, module.name);
    std::string reason = ReasonFor(module, full);
    if (!reason.empty()) {
      absl::flat_hash_set<int> seen;
      std::vector<int> parameters;
      CollectParameters(module, seen, parameters);
      const int64_t bytes = Bytes(parameters);
      if (bytes <= options_.max_leaf_bytes) {
        Add(module, full, std::move(parameters), std::move(reason));
        return;
      }
      selection_.refused.push_back(
          {full, bytes, absl::StrCat(reason, ", but over the cap of ", options_.max_leaf_bytes, " bytes")});
    }
    std::vector<int> own;
    AppendOnce(module.parameters, own);
    Add(module, full, std::move(own), "own parameters");
    for (const ModuleNode& child : module.children) Visit(child, full);
  }

  const ModelDescription& model_;
  const LeafOptions& options_;
  std::vector<bool> used_;
  std::vector<bool> rule_used_;
  absl::flat_hash_set<std::string> module_names_;
  LeafSelection selection_;
};

// '**' any run, '*' any run without '.', '?' one character but '.'.
bool GlobFrom(absl::string_view pattern, absl::string_view name) {
  while (!pattern.empty()) {
    if (pattern.front() == '*') {
      const bool deep = pattern.size() > 1 && pattern[1] == '*';
      const absl::string_view rest = pattern.substr(deep ? 2 : 1);
      for (size_t skip = 0; skip <= name.size(); ++skip) {
        if (GlobFrom(rest, name.substr(skip))) return true;
        if (!deep && skip < name.size() && name[skip] == '.') return false;
      }
      return false;
    }
    if (name.empty()) return false;
    if (pattern.front() == '?' ? name.front() == '.' : pattern.front() != name.front()) return false;
    pattern.remove_prefix(1);
    name.remove_prefix(1);
  }
  return name.empty();
}

}  // namespace

int LeafSelection::Find(absl::string_view name) const {
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

std::string LeafSelection::ToTable() const {
  std::string out = absl::StrFormat("%-36s %10s %14s  %s\n", "leaf", "parameters", "bytes", "why");
  for (const Leaf& leaf : leaves) {
    absl::StrAppendFormat(&out, "%-36s %10d %14d  %s\n", leaf.name, leaf.parameters.size(), leaf.bytes, leaf.reason);
  }
  for (const RefusedLeaf& refused : this->refused) {
    absl::StrAppendFormat(&out, "%-36s %10s %14d  %s\n", refused.name, "refused", refused.bytes, refused.reason);
  }
  return out;
}

absl::StatusOr<LeafSelection> SelectLeaves(const ModelDescription& model, const LeafOptions& options) {
  return Selector(model, options).Run();
}

Granularity ModuleGranularity(const ModelDescription& model, const ModuleNode& module) {
  int64_t own = 0;
  for (int p : module.parameters) own += model.parameters[static_cast<size_t>(p)].num_elements();
  if (module.children.empty()) return {own, own > 0 ? 1 : 0, false};
  Granularity sum;
  for (const ModuleNode& child : module.children) {
    const Granularity g = ModuleGranularity(model, child);
    sum.parameters += g.parameters;
    sum.layers += g.layers;
  }
  if (module.container) return {sum.parameters + own, sum.layers, false};
  sum.parameters += own;
  sum.layers += 1;
  sum.eligible = sum.parameters > 0;
  return sum;
}

bool GlobMatches(absl::string_view pattern, absl::string_view name) { return GlobFrom(pattern, name); }

}  // namespace evenkeel::zero3
