// What S3 says in XML, as far as the tier reads it: elements by name, and text. Anything may come in; what is no such XML has no
// elements.
#ifndef KVPOOL_SERVER_TIERS_S3_XML_H_
#define KVPOOL_SERVER_TIERS_S3_XML_H_

#include <string>
#include <string_view>
#include <vector>

namespace kvpool {

// What is within each element of this name, in order, as it stands there. An element within one of the same name is not seen.
std::vector<std::string_view> XmlElements(std::string_view xml, std::string_view name);
// The text of the first one; empty: there is none.
std::string XmlText(std::string_view xml, std::string_view name);
std::string XmlEscape(std::string_view text);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_XML_H_
