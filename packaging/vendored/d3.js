// The parts of d3 that Plot draws charts with. Maps, transitions and zooming are left out.
export * from "d3-array";
export * from "d3-axis";
export * from "d3-color";
export * from "d3-contour";
export * from "d3-delaunay";
export * from "d3-format";
export {geoTransform} from "d3-geo";
export * from "d3-hierarchy";
export * from "d3-interpolate";
export * from "d3-path";
export * from "d3-random";
export * from "d3-scale";
export * from "d3-scale-chromatic";
export * from "d3-selection";
export * from "d3-shape";
export * from "d3-time";
export * from "d3-time-format";
const none = undefined;
export {
  none as geoAlbers, none as geoAlbersUsa, none as geoAzimuthalEqualArea, none as geoAzimuthalEquidistant,
  none as geoCentroid, none as geoClipRectangle, none as geoConicConformal, none as geoConicEqualArea,
  none as geoConicEquidistant, none as geoEqualEarth, none as geoEquirectangular, none as geoGnomonic,
  none as geoGraticule10, none as geoMercator, none as geoOrthographic, none as geoPath, none as geoStereographic,
  none as geoStream, none as geoTransverseMercator,
};
