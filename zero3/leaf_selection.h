// Which parameters are fetched, released and reduced together: the leaves of a model.
//
// The model is described as a value: a tree of modules with types and parameter indices. A leaf is the ordered list of
// all parameters below one module. Rules choose leaves; a parameter outside every chosen leaf belongs to a leaf of its
// own module's direct parameters. Nothing is chosen silently: ToTable() says what and why.
//
//   ModelDescription model = ...;                       // parameters and module tree
//   LeafOptions options;
//   options.rules.push_back(LeafRule::Type("MoeBlock"));
//   options.max_leaf_bytes = 64 << 20;
//   EK_ASSIGN_OR_RETURN(LeafSelection selection, SelectLeaves(model, options));
//   std::cout << selection.ToTable();
//
// Order of decision, walking the tree from the root: a module that a rule matches (or whose granularity is at most the
// threshold) becomes a leaf unless its bytes exceed max_leaf_bytes; inside a leaf nothing else is looked at (outermost
// wins); over the cap the walk goes on inside, and the refusal is reported.
// Granularity: parameters / (1 + layers) as in DeepSpeed #6649: a module without children counts as one layer when it
// owns parameters; a container passes its children's sums through and is never chosen by granularity.
#ifndef EVENKEEL_ZERO3_LEAF_SELECTION_H_
#define EVENKEEL_ZERO3_LEAF_SELECTION_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/zero3/parameter_spec.h"

namespace evenkeel::zero3 {

// One module of the tree. Names are relative to the parent; full names join them with '.'; the root's is its own name.
struct ModuleNode {
  std::string name;
  std::string type;             // "MoeBlock", "Linear"
  std::vector<int> parameters;  // indices into ModelDescription::parameters that this module uses directly
  std::vector<ModuleNode> children;
  bool container = false;  // a list, dict or sequence: passes through, never a leaf by granularity
};

struct ModelDescription {
  std::vector<ParameterSpec> parameters;
  ModuleNode root;  // a parameter may be used by several modules (tied); every parameter is used by at least one
};

struct LeafRule {
  enum class Kind : uint8_t { kName, kGlob, kType };
  Kind kind = Kind::kName;
  std::string pattern;

  // The full name of one module. It must exist.
  static LeafRule Name(std::string name) { return {Kind::kName, std::move(name)}; }
  // '*' matches any run of characters but '.', '**' any run, '?' one character but '.'.
  static LeafRule Glob(std::string pattern) { return {Kind::kGlob, std::move(pattern)}; }
  // The exact type name.
  static LeafRule Type(std::string type) { return {Kind::kType, std::move(type)}; }
};

struct LeafOptions {
  std::vector<LeafRule> rules;
  // Modules with granularity <= this become leaves; 0: off.
  int64_t granularity_threshold = 0;
  // No leaf chosen by a rule or by granularity holds more bytes than this.
  int64_t max_leaf_bytes = std::numeric_limits<int64_t>::max();
};

struct Leaf {
  std::string name;  // full name of the module
  std::string type;
  std::vector<int> parameters;  // indices, in tree order, each once
  int64_t bytes = 0;            // of its parameters, gathered, without padding
  std::string reason;           // "type MoeBlock", "granularity 744 <= 750", "own parameters"
};

struct RefusedLeaf {
  std::string name;
  int64_t bytes = 0;
  std::string reason;  // the rule that matched, and the cap
};

struct LeafSelection {
  std::vector<Leaf> leaves;  // in tree order; every parameter is in at least one
  std::vector<RefusedLeaf> refused;

  // Index of the leaf called `name`, or -1.
  int Find(absl::string_view name) const;
  // Leaf, parameters, bytes, why; then what was refused.
  std::string ToTable() const;
};

// Pure. InvalidArgument naming the culprit: bad parameter, index out of range, unused or doubled name, a rule that
// matches nothing, max_leaf_bytes <= 0, a negative threshold.
absl::StatusOr<LeafSelection> SelectLeaves(const ModelDescription& model, const LeafOptions& options);

// `parameters / (1 + layers)` of one module, or nothing where it is not defined (containers, childless modules).
struct Granularity {
  int64_t parameters = 0;
  int64_t layers = 0;
  bool eligible = false;
  int64_t value() const { return parameters / (layers < 1 ? 1 : layers); }
};
Granularity ModuleGranularity(const ModelDescription& model, const ModuleNode& module);

// Whether `name` matches `pattern` (see LeafRule::Glob).
bool GlobMatches(absl::string_view pattern, absl::string_view name);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_LEAF_SELECTION_H_
